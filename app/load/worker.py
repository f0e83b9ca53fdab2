"""A claiming process without HTTP: `python -m app.load.worker`, configured by SCHEDULER_* as a replica is.

It runs the product's own claim strategy, lease keeper and settler, and takes every run for delivered at once, with
the evidence that a delivery has. What it shows is what the database and these parts cost, without any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

import uvloop

from app.boottime import boottime
from app.claim.keeper import LeaseKeeper
from app.claim.load import TenantLoad
from app.domain.outcome import Answer, Delivered, Sent, Timing
from app.domain.run import ClaimedRun, Complete, Evidence, Settled
from app.executor.attempt import database_time
from app.executor.settler import Settler
from app.local.processes import end_with_parent
from app.main import SETTLE_CONNECTIONS, Pools, build_claims
from app.settings import Settings, load_settings
from app.store.pool import PLAN_GUARDS, Connection, close_pool, connect, create_pool

TIMING = Timing(timedelta(microseconds=20), timedelta(milliseconds=1), timedelta(milliseconds=1))
ANSWER = Answer(204, (), "", truncated=False)
SENT = Sent("POST", "http://127.0.0.1/", (("Content-Type", "application/json"),), 39)


def main() -> None:
    """Claim and settle until SIGTERM or the parent's end. Says `ready` on standard output first."""
    end_with_parent(signal.SIGTERM)
    uvloop.run(_work(load_settings()))


async def _work(settings: Settings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        pools = await _pools(settings, stack)
        worker = Worker(settings, pools)
        stack.push_async_callback(worker.close)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await worker.run(stopped)


class Worker:
    """Claims as far as slots are free, settles what it has claimed."""

    def __init__(self, settings: Settings, pools: Pools) -> None:
        executor = settings.executor
        rng = random.Random()
        self._settings = settings
        self._load = TenantLoad(slots=executor.slots, cap=executor.slots_per_tenant)
        self._claims = build_claims(settings, pools, self._load, rng)
        self._keeper = LeaseKeeper(self._keeper_connection, ttl=executor.lease_ttl)
        self._settler = Settler(pools.settle, batch=executor.settle_batch, wait=executor.settle_wait, rng=rng)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stopped: asyncio.Event) -> None:
        """Until `stopped`, then until everything claimed is settled."""
        await self._claims.open()
        async with asyncio.TaskGroup() as group:
            settling = group.create_task(self._settler.run())
            keeping = group.create_task(self._keep())
            claiming = group.create_task(self._claim_all(stopped))
            await stopped.wait()
            await self._claims.leave()
            await claiming
            while self._tasks:
                await asyncio.wait(self._tasks)
            keeping.cancel()
            self._settler.finish()
            await settling

    async def close(self) -> None:
        await self._claims.close()
        await self._keeper.close()

    async def _claim_all(self, stop: asyncio.Event) -> None:
        batch = self._settings.executor.batch
        while not stop.is_set():  # once it has left, the strategy returns nothing without waiting
            if self._load.idle < min(batch, self._load.slots // 4):
                await self._load.slot_freed(at_most=timedelta(seconds=1), stop=stop)
                continue
            runs = await self._claims.claim(min(self._load.idle, batch))
            for run in runs:
                self._load.take(run.lease.ref.tenant_id)
            if runs:
                task = asyncio.create_task(self._settle(runs))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _settle(self, runs: Sequence[ClaimedRun]) -> None:
        """Hold every lease until its settlement is acknowledged, as an attempt does."""
        with contextlib.ExitStack() as holds:
            settled: list[Settled] = []
            for run in runs:
                holds.enter_context(self._keeper.hold(run)).confirm()
                settled.append(Settled(run.lease, Complete(), self._evidence(run)))
            await asyncio.gather(*(self._settler.settle(one) for one in settled))
        for run in runs:
            self._load.give(run.lease.ref.tenant_id)

    def _evidence(self, run: ClaimedRun) -> Evidence:
        at = database_time(run)
        return Evidence(
            outcome=Delivered(ANSWER, TIMING),
            sent=SENT,
            schedule_version=run.schedule_version or 1,
            started_at=at,
            finished_at=at,
            worker=self._settings.replica,
        )

    async def _keep(self) -> None:
        while True:
            begun = boottime()
            await self._keeper.extend_all()
            pause = self._settings.executor.keeper_interval.total_seconds() - (boottime() - begun)
            await asyncio.sleep(max(0.0, pause))

    async def _keeper_connection(self) -> Connection:
        return await connect(
            self._settings.database.dsn,
            application_name=f"carillon {self._settings.replica} keeper",
            settings={"plan_cache_mode": "force_generic_plan"},
        )


async def _pools(settings: Settings, stack: contextlib.AsyncExitStack) -> Pools:
    """The pools of a replica."""
    name = f"carillon {settings.replica}"
    dsn, database = settings.database.dsn, settings.database
    main = await create_pool(dsn, size=database.pool_size, application_name=name)
    stack.push_async_callback(close_pool, main)
    claim = await create_pool(
        dsn, size=database.claim_pool_size, application_name=f"{name} claim", settings=PLAN_GUARDS
    )
    stack.push_async_callback(close_pool, claim)
    settle = await create_pool(
        dsn, size=SETTLE_CONNECTIONS, application_name=f"{name} settle", settings=PLAN_GUARDS
    )
    stack.push_async_callback(close_pool, settle)
    return Pools(main, claim, settle)


if __name__ == "__main__":
    main()
