"""One round of a load run: a fleet, schedules that become due, every delivery counted at the target.

    start target and replicas → choose the instant → COPY the schedules, CHECKPOINT → wait until just before the
    planner's look-ahead reaches the instant → read the counters → everything planned, delivered and recorded →
    read them again → drain the fleet → ask the target and the database what happened

The planner, the claims and the deliveries are the product's own; nothing is told to hurry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.errors import CarillonError
from app.load import seeds
from app.load.arrivals import Arrivals
from app.load.clock import ClockOffset, clock_offset
from app.load.costs import Costs, Meter
from app.load.ledger import Ledger, fetch_counts, fetch_ledger
from app.load.place import Place
from app.load.progress import Show
from app.load.stage import Accident, Before, Fleet, History, Outcome, Seeds, Stage
from app.settings import Settings, load_settings
from app.store import load_measure, load_seed
from app.store.load_seed import SeededSchedule
from app.store.pool import Connection

LEAD = timedelta(seconds=2)
SEEDED_PER_SECOND = 12_000
"""Schedules that COPY and CHECKPOINT manage on a slow machine; where it is slower still, the round begins again."""
QUIET = timedelta(milliseconds=500)
"""The counters are read so long before the planner's look-ahead reaches the first instant."""
TRIES = 4
LOOK_EVERY = 0.2
STEP_MS = 100
"""Milliseconds of one step of the series."""
STALL = timedelta(seconds=45)
"""Beyond a lease and a retry, a round without any progress for so long is over: what is missing is missing."""


async def play(
    place: Place,
    fleet: Fleet,
    make: Seeds,
    show: Show,
    *,
    tenants: int,
    before: Before | None = None,
    accident: Accident | None = None,
    history: History = History.CLEARED,
) -> Outcome:
    """Play one round. Raises CarillonError when a process ends or seeding takes too long."""
    place = place.afresh()
    settings = settings_of(place)
    target = await place.launch_target(*fleet.target_options)
    replicas = [place.launch_replica(f"planner-{n}", "planner") for n in range(1, fleet.planners + 1)]
    replicas += [place.launch_replica(f"executor-{n}", "executor") for n in range(1, fleet.executors + 1)]
    show.step(f"starting {len(replicas)} replicas")
    try:
        await place.ready(replicas)
        # What it asks while something is measured are steps into an index. By statistics from before the schedules
        # came, PostgreSQL would rather read a million idle ones several times a second: a third of a core.
        async with place.connection("load watch", enable_seqscan="off") as conn:
            stage = Stage(place, target, replicas, conn)
            await _begin(conn, tenants, history)
            due = await _seed(stage, make, show, settings, tenants=tenants, before=before)
            first, _ = span_of(due)
            async with _happening(accident, stage, first):
                watched = await _watch(stage, due, show, settings, is_delivered=fleet.executors > 0)
            return await _conclude(stage, due, watched, show)
    finally:
        place.stop()


@asynccontextmanager
async def _happening(accident: Accident | None, stage: Stage, first: datetime) -> AsyncIterator[None]:
    """Let it happen for the length of the block; what it raised itself is raised at the end."""
    if accident is None:
        yield
        return
    happening = asyncio.create_task(accident(stage, first))
    try:
        yield
    finally:
        happening.cancel()
        try:
            await happening
        except asyncio.CancelledError:
            if not happening.cancelled():
                raise


def settings_of(place: Place) -> Settings:
    """The settings that the replicas run with. Raises ConfigError for a wrong `--set`."""
    return load_settings({**place.replica_settings(), "SCHEDULER_DATABASE_URL": place.dsn})


async def _begin(conn: Connection, tenants: int, history: History) -> None:
    """Empty the tables, unless what earlier rounds have left is to stay; then the tenants are there already."""
    if history is History.CLEARED or not await load_measure.is_seeded(conn):
        await load_seed.clear(conn)
        await load_seed.copy_tenants(conn, seeds.tenant_ids(tenants), at=await load_measure.clock(conn))


async def _seed(
    stage: Stage, make: Seeds, show: Show, settings: Settings, *, before: Before | None, tenants: int
) -> list[SeededSchedule]:
    """Copy schedules that are due soon, but not before the planner can have them in its look-ahead as a whole."""
    conn, url = stage.conn, stage.target.url
    count = len(make(await load_measure.clock(conn), url))
    lead = LEAD + timedelta(seconds=count / SEEDED_PER_SECOND)
    if before is not None:
        await before(stage)
    for _ in range(TRIES):
        show.step(f"seeding {count:,} schedules of {tenants:,} tenants")
        now = await load_measure.clock(conn)
        first = whole_millisecond(now + lead + settings.planner.lookahead + QUIET)
        due = list(make(first, url))
        await load_seed.copy_schedules(conn, due, expires_after=seeds.EXPIRES_AFTER, at=now)
        if stage.place.postgres_pid is not None:
            await load_seed.checkpoint(conn)
        left = first - settings.planner.lookahead - QUIET - await load_measure.clock(conn)
        if left > timedelta():
            await asyncio.sleep(left.total_seconds())
            return due
        lead *= 2
        show.step("that took too long: once more, with more time")
        await load_seed.take_back(conn, first, span_of(due)[1])
    raise CarillonError(f"{count:,} schedules could not be seeded in time, even with a lead of {lead}")


def span_of(due: Sequence[SeededSchedule]) -> tuple[datetime, datetime]:
    """The first and the last instant."""
    instants = [one.next_fire_at for one in due]
    return min(instants), max(instants)


def whole_millisecond(instant: datetime) -> datetime:
    """The next whole millisecond: occurrences have no finer digits."""
    return instant.replace(microsecond=instant.microsecond // 1000 * 1000) + timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class _Watched:
    """What only the time of the round itself could tell."""

    offset: ClockOffset
    planned_seen_at: datetime | None
    costs: Costs


async def _watch(
    stage: Stage, due: Sequence[SeededSchedule], show: Show, settings: Settings, *, is_delivered: bool
) -> _Watched:
    """Wait for the end of the round between two readings of the counters."""
    conn = stage.conn
    _, last = span_of(due)
    offset = await clock_offset(conn)
    meter = await Meter.read(conn, stage.place.measured(stage.replicas, stage.targets))
    show.step("planning, delivering and recording" if is_delivered else "planning")
    stall = STALL + settings.executor.lease_ttl
    with show.bar("delivered", len(due)) as advance:
        look_every = LOOK_EVERY if is_delivered else LOOK_EVERY / 10
        planned_seen_at = await _until_planned(stage, last, stall, advance, look_every=look_every)
        if is_delivered and planned_seen_at is not None:
            await _until_delivered(stage, last, len(due), stall, advance)
    return _Watched(offset, planned_seen_at, await meter.costs(conn))


async def _conclude(stage: Stage, due: Sequence[SeededSchedule], watched: _Watched, show: Show) -> Outcome:
    """Drain the fleet, then ask the target and the database what has happened."""
    span = first, _ = span_of(due)
    show.step("draining the fleet, reading the ledger")
    stage.place.stop([replica.child for replica in stage.replicas])
    async with stage.place.connection() as conn:
        return Outcome(
            first=first,
            last=span[1],
            due_ns={seeds.delivery_key(one): seeds.instant_ns(one.next_fire_at) for one in due},
            planned=await load_measure.planned(conn, *span),
            planned_seen_at=watched.planned_seen_at,
            ended=await load_measure.ended(conn, *span),
            succeeded=frozenset(one.bytes for one in await load_measure.succeeded_ids(conn, *span)),
            ledger=await _ledger(stage),
            offset=watched.offset,
            costs=watched.costs,
            planned_series=await load_measure.planned_series(conn, *span, zero=first, step_ms=STEP_MS),
            recorded_series=await load_measure.recorded_series(conn, *span, zero=first, step_ms=STEP_MS),
        )


async def _until_planned(
    stage: Stage, last: datetime, stall: timedelta, advance: Callable[[int], None], *, look_every: float
) -> datetime | None:
    """Wait until every occurrence up to `last` has its run; when that was first seen, by the database's clock.

    None when it has not happened `stall` after `last`.
    """
    while True:
        stage.place.require_alive()
        now = await load_measure.clock(stage.conn)
        if not await load_measure.is_unplanned(stage.conn, last):
            return await load_measure.clock(stage.conn)
        if now > last + stall:
            return None
        advance(await _delivered(stage))  # over a stretch of time, planning goes on while deliveries do
        await asyncio.sleep(look_every)


async def _until_delivered(
    stage: Stage, last: datetime, expected: int, stall: timedelta, advance: Callable[[int], None]
) -> None:
    """Wait until every run of an instant up to `last` has ended, or nothing moves any more for so long."""
    seen, moved_at = -1, time.monotonic()
    while True:
        stage.place.require_alive()
        delivered = await _delivered(stage)
        advance(delivered)
        if delivered != seen:
            seen, moved_at = delivered, time.monotonic()
        now = await load_measure.clock(stage.conn)
        if now > last and not await load_measure.is_open(stage.conn, last):
            return
        if now > last and time.monotonic() - moved_at > stall.total_seconds():
            return
        await asyncio.sleep(LOOK_EVERY if seen < expected else LOOK_EVERY / 10)


async def _delivered(stage: Stage) -> int:
    """How many requests have come; of a target that does not tell, how many runs have succeeded."""
    counted = 0
    for target in stage.targets:
        if target.port is None:
            return await load_measure.succeeded_so_far(stage.conn)
        counted += (await asyncio.to_thread(fetch_counts, target.port))["requests"]
    return counted


async def _ledger(stage: Stage) -> Ledger | None:
    """What all targets have received; None when one of them keeps no ledger."""
    together = Arrivals()
    for target in stage.targets:
        if target.port is None:
            return None
        found = (await asyncio.to_thread(fetch_ledger, target.port)).arrivals
        together.times.extend(found.times)
        together.keys.extend(found.keys)
    return Ledger(together)
