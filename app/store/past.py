"""Occurrences that are due already and not planned yet, at the moment of an edit. None of them may vanish.

The planner may be some seconds behind, or the schedule may have been paused for months. Before an edit moves
the pointer, what lies before it is accounted for: planned as the planner would have done a moment earlier, or
recorded as a stretch with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from app.domain.ids import run_id
from app.domain.plan import Due, Limits, Skipped, plan, skip_until
from app.domain.schedule import Schedule, SkipReason
from app.errors import PartitionMissing
from app.store import partitions, planning
from app.store.planning import NewDisposition, NewRun
from app.store.pool import Connection

ROUNDS: Final = 10
"""Bounds an edit's computing to ROUNDS x Limits.walked occurrences, some tenths of a second for the worst
cron.
"""


async def plan_past(
    conn: Connection, schedule: Schedule, *, now: datetime, limits: Limits, rest: SkipReason
) -> Schedule:
    """Plan what an active schedule owes up to `now`; the schedule with its pointer and `last_fire_at` moved.

    What a rule that raises cannot tell, or what is more than an edit can compute, is recorded as `rest`.
    Raises PartitionMissing when the current month is not attached.
    """
    if schedule.next_fire_at is None or schedule.next_fire_at > now:
        return schedule
    limits = replace(limits, oldest=await _oldest(conn, now))
    for _ in range(ROUNDS):
        due = _due(schedule)
        if due is None or due.next_fire_at > now:
            return schedule
        try:
            planned = plan(due, now=now, horizon=now, limits=limits)
        except Exception:  # noqa: BLE001  # whatever the rule raises must not make the schedule uneditable
            break
        await _insert(conn, schedule, planned.occurrences)
        await _record(conn, schedule, planned.skipped)
        last = planned.occurrences[-1] if planned.occurrences else schedule.last_fire_at
        schedule = replace(schedule, next_fire_at=planned.next_fire_at, last_fire_at=last)
    await skip_past(conn, schedule, now=now, reason=rest)
    return schedule


async def skip_past(conn: Connection, schedule: Schedule, *, now: datetime, reason: SkipReason) -> None:
    """Record the occurrences from the pointer to `now` as one stretch. A rule that raises is counted as "at
    least 1".
    """
    due = _due(schedule)
    if due is None or due.next_fire_at > now:
        return
    try:
        skipped = skip_until(due, now=now, reason=reason)
    except Exception:  # noqa: BLE001  # whatever the rule raises must not make the schedule uneditable
        skipped = Skipped(due.next_fire_at, now, 1, reason)
    if skipped is not None:
        await _record(conn, schedule, [skipped])


async def _oldest(conn: Connection, now: datetime) -> datetime:
    for span in await partitions.attached_range(conn):
        if now in span:
            return span.start
    raise PartitionMissing("the current month has no partition")


async def _insert(conn: Connection, schedule: Schedule, occurrences: Sequence[datetime]) -> None:
    if not occurrences:
        return
    runs = [
        NewRun(
            id=run_id(schedule.id, at),
            scheduled_for=at,
            tenant_id=schedule.tenant_id,
            schedule_id=schedule.id,
            schedule_version=schedule.version,
            max_attempts=schedule.retry.max_attempts,
            expires_at=at + schedule.expires_after,
        )
        for at in occurrences
    ]
    await planning.insert_runs(conn, runs)


async def _record(conn: Connection, schedule: Schedule, skipped: Sequence[Skipped]) -> None:
    if skipped:
        stretches = [NewDisposition(schedule.tenant_id, schedule.id, one) for one in skipped]
        await planning.record_skipped(conn, stretches)


def _due(schedule: Schedule) -> Due | None:
    if schedule.next_fire_at is None:
        return None
    return Due(
        schedule.id, schedule.recurrence, schedule.misfire, schedule.expires_after, schedule.next_fire_at
    )
