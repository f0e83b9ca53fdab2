"""The composition root: builds one replica from its settings, runs its loops, and stops them in the right order.

SIGTERM or SIGINT drains (a second one skips the wait):

    1 /readyz says draining, planner, reaper and maintenance stop
    2 the executor claims no more, the strategy leaves
    3 deliveries in flight finish within the grace; the rest is released, or retried if it may have been sent
    4 the settler writes what is left
    5 the keeper ends: leases stay true while anything runs
    6 health, API, strategy, sessions and pools close
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import assert_never

from app import maintenance, metrics
from app.claim.due import DueClaims
from app.claim.grant import Grants
from app.claim.keeper import LeaseKeeper
from app.claim.load import TenantLoad
from app.claim.postgres import Pace, PostgresClaims
from app.claim.reaper import Reaper
from app.claim.strategy import ClaimStrategy
from app.domain.address import PUBLIC_ONLY, WITH_LOOPBACK
from app.domain.zones import TZDATA_VERSION
from app.errors import StoreUnavailable
from app.executor.attempt import Desk
from app.executor.deliver import open_session
from app.executor.orders import OrderBook
from app.executor.pool import Executor
from app.executor.settler import Settler
from app.loops import Loop, LoopHealth, run_loop, sleep_or_stop
from app.planner.tick import Planner
from app.serving import ApiServer
from app.settings import ClaimMode, Role, Settings
from app.store import migrations
from app.store.pool import PLAN_GUARDS, Connection, Pool, close_pool, connect, create_pool

logger = logging.getLogger(__name__)

FIRST_CONTACT = timedelta(seconds=30)
"""How long a starting replica waits for its database before it gives up."""
SETTLE_WITHIN = timedelta(seconds=5)
"""After the grace: the time for settling what was cut off, and for the settler's last groups."""
LEAVE_WITHIN = timedelta(seconds=5)
RECOVERY = timedelta(seconds=2)
"""The longest pause of planner and claims between two tries while the database is away."""
SETTLE_CONNECTIONS = 2
"""One group is written at a time; the other is for what follows a lost connection."""
SILENCE = timedelta(seconds=5)
"""Past its own time-out for a statement, the server is given this long before a connection counts as dead."""
GAUGES_EVERY = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Pools:
    """`claim` is for claims, planner and reaper alone, `settle` for settling: their sessions run under PLAN_GUARDS.
    `main` is for the rest.

    Settling stands on its own, so that a result waits neither for a planner's batch nor for an API query. Without the
    guards it may hash the whole backlog for each group, and keep that plan: a burst took four times as long.
    """

    main: Pool
    claim: Pool
    settle: Pool


@dataclass(slots=True)
class Stops:
    """`taking`: begin nothing new. `keeping`: nothing runs any more, let go of leases, gauges and health."""

    taking: asyncio.Event
    keeping: asyncio.Event


async def serve(settings: Settings) -> int:
    """Run one replica until a signal or a broken part ends it. Returns the exit code: 0 after a drain, 1 if runs were
    left unsettled. Raises CarillonError when it cannot start."""
    stop = _stop_signals()
    await _first_contact(settings, stop.first)
    if stop.first.is_set():
        return 0
    async with AsyncExitStack() as stack:
        pools = await stack.enter_async_context(_pools(settings))
        replica = Replica(settings, pools)
        stack.push_async_callback(replica.close)
        return await replica.run(stop)


class Replica:
    """Everything that one process runs, wired together."""

    def __init__(self, settings: Settings, pools: Pools) -> None:
        self._settings = settings
        self._health = LoopHealth()
        self._stops = Stops(asyncio.Event(), asyncio.Event())
        self._rng = random.Random()
        executor = settings.executor
        self._load = TenantLoad(slots=executor.slots, cap=executor.slots_per_tenant)
        self._claims = build_claims(settings, pools, self._load, self._rng)
        self._keeper = LeaseKeeper(self._keeper_connection, ttl=executor.lease_ttl)
        self._settler = Settler(
            pools.settle, batch=executor.settle_batch, wait=executor.settle_wait, rng=self._rng
        )
        address_policy = WITH_LOOPBACK if executor.allow_loopback_targets else PUBLIC_ONLY
        self._deliverer = open_session(address_policy, connections=executor.slots)
        self._executor = Executor(
            claims=self._claims,
            book=OrderBook(pools.main),
            desk=Desk(
                keeper=self._keeper,
                deliverer=self._deliverer,
                settler=self._settler,
                worker=settings.replica,
                timeout=executor.delivery_timeout,
                rng=self._rng,
            ),
            load=self._load,
            batch=executor.batch,
        )
        self._planner = Planner(pools.claim, self._claims.announce, settings.planner)
        self._reaper = Reaper(pools.claim, self._claims, ttl=executor.lease_ttl)
        self._api = ApiServer(
            settings,
            pool=pools.main,
            health=self._health,
            policy=address_policy,
            announce=self._claims.announce,
            is_draining=self._stops.taking.is_set,
        )
        self._pools = pools

    async def run(self, stop: Signals) -> int:
        metrics.BUILD_INFO.labels(version("carillon")).set(1)
        metrics.TZDATA_INFO.labels(TZDATA_VERSION).set(1)
        for name, pool in (
            ("main", self._pools.main),
            ("claim", self._pools.claim),
            ("settle", self._pools.settle),
        ):
            metrics.watch_pool(name, size=pool.get_size, idle=pool.get_idle_size)
        self._api.bind()
        await self._claims.open()
        _spare_collections()
        orphans = 0
        async with asyncio.TaskGroup() as group:
            keeping = [self._run_until(self._stops.keeping, loop, group) for loop in self._keeping_loops()]
            taking = [self._run_until(self._stops.taking, loop, group) for loop in self._taking_loops()]
            settling = group.create_task(self._settler.run())
            api = group.create_task(self._api.serve())
            logger.info("replica.ready", extra={"url": self._api.url, "roles": sorted(self._settings.roles)})
            await stop.first.wait()
            logger.info("drain.begun", extra={"in_flight": self._load.in_flight})
            hurry = group.create_task(self._hurry_on(stop.second))
            orphans = await self._drain(taking)
            self._settler.finish()
            orphans = max(orphans, await _ended_within(SETTLE_WITHIN, settling))
            self._stops.keeping.set()
            self._api.stop()
            hurry.cancel()
            await asyncio.wait([*keeping, api])
        logger.info("drain.done", extra={"unsettled": orphans})
        return 1 if orphans else 0

    async def _drain(self, taking: list[asyncio.Task[None]]) -> int:
        """Stop taking, finish or give back what is in flight; how many runs are left to the other replicas."""
        self._stops.taking.set()
        self._executor.stop_taking()
        await _bounded("leave", self._claims.leave(), LEAVE_WITHIN)
        if taking:
            await asyncio.wait(taking, timeout=LEAVE_WITHIN.total_seconds())
        orphans = await self._executor.drain(
            grace=self._settings.executor.drain_grace, settle_within=SETTLE_WITHIN
        )
        if orphans:
            logger.error("drain.orphans", extra={"runs": orphans})
        return orphans

    async def _hurry_on(self, second: asyncio.Event) -> None:
        await second.wait()
        self._executor.hurry()

    async def close(self) -> None:
        await _bounded("close claims", self._claims.close(), LEAVE_WITHIN)
        await self._keeper.close()
        await self._deliverer.close()

    def _taking_loops(self) -> list[Loop]:
        settings = self._settings
        loops: list[Loop] = []
        if Role.PLANNER in settings.roles:
            loops.append(Loop("planner", settings.planner.tick, self._planner.plan_due, recovery=RECOVERY))
        if Role.EXECUTOR in settings.roles:
            metrics.SLOTS.set(settings.executor.slots)
            loops.append(
                Loop("claim", settings.claim.poll_interval, self._executor.claim_and_start, recovery=RECOVERY)
            )
            loops.append(Loop("reaper", settings.claim.reap_interval, self._reaper.reap_expired))
        if Role.MAINTENANCE in settings.roles:
            loops.append(
                Loop(
                    "partitions",
                    settings.partitions.check_interval,
                    lambda: maintenance.roll_partitions(self._pools.main, settings.partitions),
                )
            )
            loops.append(
                Loop(
                    "retention",
                    settings.retention.check_interval,
                    lambda: maintenance.apply_retention(self._pools.main, settings.retention),
                )
            )
        return loops

    def _keeping_loops(self) -> list[Loop]:
        loops = [Loop("gauges", GAUGES_EVERY, lambda: maintenance.refresh_gauges(self._pools.main))]
        if Role.EXECUTOR in self._settings.roles:
            loops.append(Loop("keeper", self._settings.executor.keeper_interval, self._keeper.extend_all))
        return loops

    def _run_until(self, stop: asyncio.Event, loop: Loop, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        return group.create_task(run_loop(loop, stop, self._health), name=loop.name)

    async def _keeper_connection(self) -> Connection:
        return await connect(
            self._settings.database.dsn,
            application_name=f"carillon {self._settings.replica} keeper",
            # It only extends: by key from the first time on, never by one pass over the month.
            settings={"plan_cache_mode": "force_generic_plan"},
            command_timeout=self._settings.executor.lease_ttl / 6,
        )


def build_claims(settings: Settings, pools: Pools, load: TenantLoad, rng: random.Random) -> ClaimStrategy:
    """The one place that knows which strategy runs."""
    grants = Grants(settings.replica, settings.executor.lease_ttl)
    match settings.claim.mode:
        case ClaimMode.POSTGRES:
            due = DueClaims(pools.claim, grants, load, rng=rng)
            return PostgresClaims(due, load, pace=Pace(poll=settings.claim.poll_interval))
        case ClaimMode.KAFKA:
            # Imported only when chosen: a replica in postgres mode does not pay for the client.
            from app.claim.kafka.claims import KafkaClaims
            from app.claim.kafka.topic import HintTopic

            kafka = settings.kafka
            due = DueClaims(pools.claim, grants, load, rng=rng, overdue_by=kafka.grace)
            return KafkaClaims(due, HintTopic(kafka, client_id=f"carillon-{settings.replica}"), load, kafka)
        case _:
            assert_never(settings.claim.mode)


@dataclass(frozen=True, slots=True)
class Signals:
    """Set by the first and the second SIGTERM or SIGINT."""

    first: asyncio.Event
    second: asyncio.Event


COLLECT_AFTER = 50_000
"""Objects made and kept between two collections of the youngest. A run in flight is some hundred of them, and none of
them is a cycle: with Python's 700, looking for cycles took an eighth of an executor's time."""


def _spare_collections() -> None:
    """What is there when the replica starts stays: no collection looks at it again, and fewer of them are made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 10, 10)


def _stop_signals() -> Signals:
    signals = Signals(asyncio.Event(), asyncio.Event())

    def note() -> None:
        (signals.second if signals.first.is_set() else signals.first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, note)
    return signals


async def _first_contact(settings: Settings, stop: asyncio.Event) -> None:
    """Wait for the database, then insist on its schema. Raises SchemaMismatch, or StoreUnavailable after a while."""
    give_up_at = asyncio.get_running_loop().time() + FIRST_CONTACT.total_seconds()
    while not stop.is_set():
        try:
            await migrations.require_current(settings.database.dsn)
        except StoreUnavailable as error:
            if asyncio.get_running_loop().time() >= give_up_at:
                raise
            logger.warning(
                "database.awaited", extra={"database": settings.database.shown, "error": str(error)}
            )
            await sleep_or_stop(timedelta(seconds=1), stop)
        else:
            return


@asynccontextmanager
async def _pools(settings: Settings) -> AsyncIterator[Pools]:
    database = settings.database
    timeout = {"statement_timeout": f"{int(database.statement_timeout.total_seconds() * 1000)}ms"}
    patience = database.statement_timeout + SILENCE
    name = f"carillon {settings.replica}"
    async with AsyncExitStack() as stack:
        main = await create_pool(
            database.dsn,
            size=database.pool_size,
            application_name=name,
            settings=timeout,
            command_timeout=patience,
        )
        stack.push_async_callback(close_pool, main)
        claim = await create_pool(
            database.dsn,
            size=database.claim_pool_size,
            application_name=f"{name} claim",
            settings={**timeout, **PLAN_GUARDS},
            command_timeout=patience,
        )
        stack.push_async_callback(close_pool, claim)
        settle = await create_pool(
            database.dsn,
            size=SETTLE_CONNECTIONS,
            application_name=f"{name} settle",
            settings={**timeout, **PLAN_GUARDS},
            command_timeout=patience,
        )
        stack.push_async_callback(close_pool, settle)
        yield Pools(main, claim, settle)


async def _bounded(what: str, work: Awaitable[None], within: timedelta) -> None:
    """Run a step of the stop in its own task: bounded, and unable to cancel the steps after it."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=within.total_seconds())
    if not done:
        task.cancel()
        logger.warning("stop.overdue", extra={"step": what})
    elif task.cancelled() or task.exception() is not None:
        error = None if task.cancelled() else task.exception()
        logger.warning("stop.failed", extra={"step": what, "error": repr(error)})


async def _ended_within(span: timedelta, task: asyncio.Task[None]) -> int:
    """1 when the task had to be cut off."""
    done, _ = await asyncio.wait([task], timeout=span.total_seconds())
    if done:
        return 0
    task.cancel()
    return 1
