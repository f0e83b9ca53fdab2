"""Writing drafts: three statements per batch, and what happens when the database refuses one.

A refused batch is repeated in halves, each in its own transaction, until the bad schedule is alone. That one
is set aside where everybody can see it; all others are planned. Only a missing month is nobody's fault: it is
asked for, and the schedule waits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from app import metrics
from app.domain.ids import ScheduleId
from app.domain.run import RunRef
from app.errors import Conflict, PartitionMissing, RowRefused, StoreError
from app.planner.draft import Draft
from app.store import partitions, planning
from app.store.partitions import Month
from app.store.planning import Advance, DueRow, NewDisposition
from app.store.pool import Connection, Pool, transaction

logger = logging.getLogger(__name__)

REFUSALS = (RowRefused, Conflict, PartitionMissing)
"""What the database says about data; everything else is about the database and ends the turn."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one committed transaction wrote. `stuck` are schedules that the guarded advance did not return."""

    runs: list[RunRef] = field(default_factory=list)
    replans: int = 0
    schedules: int = 0
    stuck: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)


async def write(conn: Connection, drafts: Sequence[Draft]) -> Written:
    """Runs, dispositions and pointers of locked schedules, in the caller's transaction. Raises one of
    REFUSALS.
    """
    new = [run for one in drafts for run in one.runs]
    refs = await planning.insert_runs(conn, new)
    stretches = [
        NewDisposition(one.row.tenant_id, one.row.id, skipped) for one in drafts for skipped in one.skipped
    ]
    if stretches:
        await planning.record_skipped(conn, stretches)
    moved = await planning.advance(conn, [_advance(one) for one in drafts])
    stuck: dict[ScheduleId, str] = {}
    if len(moved) < len(drafts):
        stuck = {
            one.row.id: "its next occurrence is not later than this one"
            for one in drafts
            if one.row.id not in moved
        }
        await _quarantine(conn, stuck, [one.row for one in drafts])
    skipped: dict[str, int] = {}
    for stretch in stretches:
        reason = stretch.skipped.reason.value
        skipped[reason] = skipped.get(reason, 0) + stretch.skipped.count
    return Written(refs, len(new) - len(refs), len(moved), len(stuck), skipped)


def _advance(one: Draft) -> Advance:
    last = one.runs[-1].scheduled_for if one.runs else None
    return Advance(one.row.id, one.row.next_fire_at, one.next_fire_at, last)


async def write_again(pool: Pool, drafts: Sequence[Draft]) -> Written:
    """`write` in a transaction of its own, for those schedules that are still as they were read."""
    async with transaction(pool) as conn:
        still = await planning.lock_again(conn, [one.row for one in drafts])
        return await write(conn, [one for one in drafts if one.row.id in still])


@dataclass(slots=True)
class Isolated:
    """What came of a refused batch."""

    written: list[Written] = field(default_factory=list)
    quarantined: int = 0
    postponed: int = 0


async def write_in_halves(pool: Pool, drafts: Sequence[Draft], refusal: StoreError) -> Isolated:
    """Write what can be written of a refused batch: some 2 log2(n) transactions per bad schedule."""
    result = Isolated()
    refused = [(drafts, refusal)]
    while refused:
        group, problem = refused.pop()
        if len(group) == 1 and isinstance(problem, PartitionMissing):
            result.postponed += 1
            await _ask_for_months(pool, group[0])
        elif len(group) == 1:
            row = group[0].row
            result.quarantined += await set_aside(
                pool, {row.id: f"the database refuses its runs: {problem}"}, [row]
            )
        else:
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                try:
                    result.written.append(await write_again(pool, half))
                except REFUSALS as again:
                    refused.append((half, again))
    return result


async def set_aside(pool: Pool, poison: Mapping[ScheduleId, str], rows: Collection[DueRow]) -> int:
    """Quarantine schedules with their reasons, visibly; how many really were (others have changed
    meanwhile).
    """
    async with transaction(pool) as conn:
        return await _quarantine(conn, poison, rows)


async def _quarantine(conn: Connection, poison: Mapping[ScheduleId, str], rows: Collection[DueRow]) -> int:
    done = await planning.quarantine(conn, poison, rows)
    for row in rows:
        if row.id in done:
            logger.error(
                "schedule.quarantined",
                extra={
                    "schedule_id": str(row.id),
                    "tenant_id": str(row.tenant_id),
                    "problem": poison[row.id],
                },
            )
    metrics.QUARANTINED.inc(len(done))
    return len(done)


async def _ask_for_months(pool: Pool, one: Draft) -> None:
    """Ask for the months ahead. One behind was taken out by retention: the next turn knows, and records
    it.
    """
    async with transaction(pool) as conn:
        current = await partitions.current_month(conn)
        for month in sorted({Month.of(run.scheduled_for) for run in one.runs}):
            if month >= current:
                await partitions.request(conn, month)
    logger.warning("planner.month_missing", extra={"schedule_id": str(one.row.id)})
