"""One turn of the planner: every due schedule becomes runs and dispositions, and its pointer moves on.

Each turn plans the on-time band first, then the overdue, so that one tenant's outage backlog does not delay
another's present. A batch is one transaction: lock (never waiting), compute, write three times, commit; then
the new runs are announced. Within a turn a batch continues behind the last row of the one before, so that
rows which cannot move never stand at the head of the queue. The next batch begins as soon as that row is known:
while the database writes one batch, the next is locked and computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from app import metrics
from app.domain.ids import MILLISECOND
from app.domain.plan import Limits
from app.domain.run import RunRef
from app.errors import PartitionMissing, StoreError
from app.planner.draft import Drafts, draft_all
from app.planner.write import REFUSALS, Written, set_aside, write, write_in_halves
from app.settings import PlannerSettings
from app.store import partitions, planning
from app.store.partitions import Month
from app.store.planning import EVER, LEFT_END, Band, Locked, Place
from app.store.pool import Pool, acquire, transaction

logger = logging.getLogger(__name__)

Announce = Callable[[Sequence[RunRef]], Awaitable[None]]
"""Told after the commit which runs are new. Returns at once and never raises; what it is told may be lost."""

ON_TIME_REACH: Final = timedelta(seconds=10)
"""How late a schedule may be and still belong to the on-time band."""
ON_TIME_BATCHES: Final = 200
OVERDUE_BATCHES: Final = 20
"""Per turn. A turn that used them up is followed by the next one at once, which looks at the on-time band
again.
"""
ABREAST: Final = 3
"""Batches under way at once, as far as the pool has connections: one of them belongs to the claims, one to the reaper.
One batch alone leaves the database idle while it computes, and this process while it writes."""
CLOCK_TOLERANCE: Final = timedelta(seconds=1)


@dataclass(slots=True)
class Planned:
    """What one turn did. `has_more` when schedules are due still; `database_now` as of the turn's
    beginning.
    """

    database_now: datetime
    batches: int = 0
    schedules: int = 0
    runs: int = 0
    replans: int = 0
    quarantined: int = 0
    postponed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    has_more: bool = False


class Planner:
    """The planner's loop body. It remembers one thing, the database's clock: going back is worth an alarm."""

    def __init__(self, pool: Pool, announce: Announce, settings: PlannerSettings) -> None:
        """`pool` has the sessions of claim and planner: opened with PLAN_GUARDS, and nothing else runs on
        it.
        """
        self._pool = pool
        self._announce = announce
        self._settings = settings
        self._latest: datetime | None = None

    async def plan_due(self) -> timedelta | None:
        """One turn; the pause until the next one: none while schedules are due still, otherwise the loop's
        own.

        Raises StoreUnavailable when the database is away and PartitionMissing when it has no current month.
        """
        planned = await plan_due(self._pool, self._announce, self._settings)
        self._watch_clock(planned.database_now)
        return timedelta() if planned.has_more else None

    def _watch_clock(self, now: datetime) -> None:
        """An alarm and no stop: the pointer and the unique guard make a clock that goes back harmless,
        whereas a planner that waited for it would make an outage of a corrected error.
        """
        if self._latest is not None and now < self._latest - CLOCK_TOLERANCE:
            went_back = (self._latest - now).total_seconds()
            logger.error("planner.clock_went_back", extra={"seconds": went_back})
        self._latest = now


async def plan_due(pool: Pool, announce: Announce, settings: PlannerSettings) -> Planned:
    """Plan what is due up to the look-ahead, on-time first; errors as in `Planner.plan_due`."""
    turn = await _begin(pool, announce, settings)
    ahead = min(settings.lookahead, turn.plannable_until - turn.planned.database_now - MILLISECOND)
    on_time = Band(reach=ON_TIME_REACH, ahead=ahead)
    overdue = Band(reach=EVER, ahead=-ON_TIME_REACH)
    on_time_is_done = await turn.plan_band(on_time, batches=ON_TIME_BATCHES)
    overdue_is_done = await turn.plan_band(overdue, batches=OVERDUE_BATCHES)
    turn.planned.has_more = not (on_time_is_done and overdue_is_done)
    return turn.planned


async def _begin(pool: Pool, announce: Announce, settings: PlannerSettings) -> _Turn:
    """Look at the database's clock and at the attached months around it; ask for a month that is about to
    lack.
    """
    async with acquire(pool) as conn:
        now = await planning.database_now(conn)
        spans = await partitions.attached_range(conn)
        span = next((one for one in spans if now in one), None)
        if span is None:
            await partitions.request(conn, Month.of(now))
            raise PartitionMissing(f"there is no partition for the current month, {Month.of(now)}")
        if span.end <= now + settings.lookahead:
            await partitions.request(conn, Month.of(span.end))
            logger.error("planner.month_missing", extra={"month": str(Month.of(span.end))})
    limits = Limits(misfire_grace=settings.misfire_grace, oldest=span.start)
    return _Turn(pool, announce, settings, limits, span.end, Planned(now))


@dataclass(frozen=True, slots=True)
class _Turn:
    pool: Pool
    announce: Announce
    settings: PlannerSettings
    limits: Limits
    plannable_until: datetime
    planned: Planned

    async def plan_band(self, band: Band, *, batches: int) -> bool:
        """Plan a band from its left end; False when it may have more than `batches` batches held."""
        abreast = asyncio.Semaphore(max(1, min(ABREAST, self.pool.get_max_size() - 2)))
        behind = LEFT_END
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(batches):
                    await abreast.acquire()
                    following: asyncio.Future[Place | None] = asyncio.get_running_loop().create_future()
                    batch = group.create_task(self._plan_batch(band, behind, following))
                    batch.add_done_callback(lambda _: abreast.release())
                    place = await following
                    if place is None:
                        return True
                    behind = place
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return False

    async def _plan_batch(self, band: Band, behind: Place, following: asyncio.Future[Place | None]) -> None:
        """Plan one batch. `following` is told as soon as it is known where the next one begins: None when this one is
        the last."""
        began = time.monotonic()
        locked = Locked(None, [])
        drafts = Drafts([], {}, 0)
        refusal: StoreError | None = None
        try:
            async with transaction(self.pool) as conn:
                locked = await planning.lock_due(conn, band, behind=behind, limit=self.settings.batch)
                if not locked.rows:
                    following.set_result(None)
                    return
                drafts = self._draft(locked)
                if drafts.taken == len(locked.rows):  # else the rest is locked until this transaction ends
                    following.set_result(self._following(locked, drafts))
                written = await write(conn, drafts.drafts)
        except REFUSALS as error:
            if not drafts.drafts:
                raise
            refusal = error
            written = Written()
        if not following.done():
            following.set_result(self._following(locked, drafts))
        await self._publish(written)
        if refusal is not None:
            await self._isolate(drafts, refusal)
        if drafts.poison:
            self.planned.quarantined += await set_aside(self.pool, drafts.poison, locked.rows)
        self.planned.batches += 1
        metrics.PLANNER_BATCH_SECONDS.observe(time.monotonic() - began)

    def _following(self, locked: Locked, drafts: Drafts) -> Place | None:
        if drafts.taken == len(locked.rows) < self.settings.batch:
            return None
        last = locked.rows[drafts.taken - 1]
        return Place(last.next_fire_at, last.id)

    def _draft(self, locked: Locked) -> Drafts:
        assert locked.now is not None
        return draft_all(
            locked.rows,
            now=locked.now,
            horizon=min(locked.now + self.settings.lookahead, self.plannable_until - MILLISECOND),
            limits=self.limits,
            runs_at_most=self.settings.rows_per_batch,
            budget=self.settings.compute_budget,
        )

    async def _isolate(self, drafts: Drafts, refusal: StoreError) -> None:
        metrics.PLANNER_BATCH_REFUSED.inc()
        isolated = await write_in_halves(self.pool, drafts.drafts, refusal)
        self.planned.quarantined += isolated.quarantined
        self.planned.postponed += isolated.postponed
        for written in isolated.written:
            await self._publish(written)

    async def _publish(self, written: Written) -> None:
        """After the commit: tell executors, and count."""
        if written.runs:
            await self.announce(written.runs)
        self.planned.runs += len(written.runs)
        self.planned.replans += written.replans
        self.planned.schedules += written.schedules
        self.planned.quarantined += written.stuck
        self.planned.skipped.update(written.skipped)
        metrics.PLANNED_RUNS.inc(len(written.runs))
        metrics.REPLANS.inc(written.replans)
        for reason, count in written.skipped.items():
            metrics.MISFIRES.labels(reason).inc(count)
