"""What people do to schedules and runs. Each verb is one transaction (a savepoint inside a caller's own).

Edits lose no occurrence: the schedule's row is locked first, what is due under the old rule is accounted for,
then the row changes, then its planned future runs follow. The planner locks the same row, so the two never
interleave.

Every verb raises NotFound for an unknown, deleted or foreign id, Conflict for a state that forbids it, and
StoreUnavailable when the row stays locked for longer than the session's lock_timeout.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from app.domain.ids import MICROSECOND, ScheduleId, TenantId, instants_of, manual_instant, run_id
from app.domain.plan import Limits
from app.domain.recurrence import next_fire, validate
from app.domain.run import RunRef
from app.domain.schedule import Schedule, ScheduleChange, ScheduleStatus, SkipReason, changed, checked_reason
from app.errors import Conflict, NotFound
from app.store import open_runs, past
from app.store.pool import Connection
from app.store.schedules import COLUMNS, schedule_of, stored

LOCK = f"""SELECT now(), {COLUMNS}
  FROM schedule
 WHERE id = $2
   AND tenant_id = $1
   AND status <> 'deleted'
   FOR UPDATE"""


async def _lock(conn: Connection, tenant: TenantId, schedule: UUID) -> tuple[datetime, tuple[Any, ...]]:
    row = await conn.fetchrow(LOCK, tenant, schedule)
    if row is None:
        raise NotFound
    return row[0], tuple(row)[1:]


WRITE = """UPDATE schedule
   SET name = $3, status = $4, status_reason = $5, version = $6, recurrence = $7::jsonb, target = $8::jsonb,
       retry = $9::jsonb, misfire = $10, overlap = $11, expires_after = $12, next_fire_at = $13,
       last_fire_at = $14, created_at = $15, updated_at = $16
 WHERE id = $1
   AND tenant_id = $2"""


async def _write(conn: Connection, schedule: Schedule) -> None:
    await conn.execute(WRITE, *stored(schedule))


async def update(
    conn: Connection,
    tenant: TenantId,
    schedule: UUID,
    change: ScheduleChange,
    *,
    expected_version: int | None = None,
    limits: Limits = Limits(),  # noqa: B008  # frozen
) -> Schedule:
    """Change what a schedule is. An edit that changes nothing moves nothing and leaves the version.

    A changed recurrence starts at its first instant after the database's now, and takes a finished or
    quarantined schedule back into work; a paused one stays paused. Raises InvalidInput naming the field, for
    a rule that never fires again too, and Conflict when `expected_version` is given and not the schedule's.
    """
    async with conn.transaction():
        now, row = await _lock(conn, tenant, schedule)
        old = schedule_of(row)
        if expected_version is not None and old.version != expected_version:
            raise Conflict(
                f"version {expected_version} was expected, but the schedule has version {old.version}"
            )
        new = changed(old, change)
        if new == old:
            return old
        new = replace(new, version=old.version + 1, updated_at=now)
        if new.recurrence == old.recurrence:
            await _write(conn, new)
            await open_runs.follow_edit(conn, new, stays=lambda run: not run.is_superseded)
            return new
        first = validate(new.recurrence, now=now, schedule_id=new.id)
        moved = await _leave_rule(conn, old, now=now, limits=limits)
        is_paused = old.status is ScheduleStatus.PAUSED
        new = replace(
            new,
            status=ScheduleStatus.PAUSED if is_paused else ScheduleStatus.ACTIVE,
            status_reason=old.status_reason if is_paused else None,
            next_fire_at=first,
            last_fire_at=moved.last_fire_at,
        )
        await _write(conn, new)
        await open_runs.follow_edit(conn, new, stays=lambda run: _fires_at(new, run.scheduled_for))
        return new


async def _leave_rule(conn: Connection, old: Schedule, *, now: datetime, limits: Limits) -> Schedule:
    """Account for what is due under the rule that is about to go."""
    if old.status is ScheduleStatus.ACTIVE:
        return await past.plan_past(conn, old, now=now, limits=limits, rest=SkipReason.SUPERSEDED)
    await past.skip_past(conn, old, now=now, reason=_idle_reason(old.status))
    return old


def _idle_reason(status: ScheduleStatus) -> SkipReason:
    return SkipReason.PAUSED if status is ScheduleStatus.PAUSED else SkipReason.QUARANTINED


def _fires_at(schedule: Schedule, at: datetime) -> bool:
    return next_fire(schedule.recurrence, at - MICROSECOND, schedule_id=schedule.id) == at


async def pause(
    conn: Connection,
    tenant: TenantId,
    schedule: UUID,
    *,
    reason: str | None = None,
    limits: Limits = Limits(),  # noqa: B008  # frozen
) -> Schedule:
    """Stop firing. Planned runs stay planned: the claim judges at fire time, so a resume before it loses
    nothing.

    What was due before the pause gets its runs still (and the claim's judgement). Pausing a paused schedule
    changes nothing. Raises Conflict for a finished or quarantined one.
    """
    reason = None if reason is None else checked_reason(reason)
    async with conn.transaction():
        now, row = await _lock(conn, tenant, schedule)
        old = schedule_of(row)
        match old.status:
            case ScheduleStatus.PAUSED:
                return old
            case ScheduleStatus.ACTIVE:
                moved = await past.plan_past(conn, old, now=now, limits=limits, rest=SkipReason.PAUSED)
            case _:
                raise Conflict(f"only an active schedule can be paused; this one is {old.status}")
        new = replace(
            moved,
            status=ScheduleStatus.PAUSED,
            status_reason=reason,
            version=old.version + 1,
            updated_at=now,
        )
        await _write(conn, new)
        return new


async def resume(conn: Connection, tenant: TenantId, schedule: UUID) -> Schedule:
    """Fire again, from the first instant after the database's now; a rule without one is finished.

    The occurrences of the pause (or quarantine) are recorded as one stretch and not made up for. Runs that
    were planned before it and are not due yet fire. Resuming an active schedule changes nothing. Raises
    Conflict for a finished one, and for a quarantined one that still cannot be planned.
    """
    async with conn.transaction():
        now, row = await _lock(conn, tenant, schedule)
        old = schedule_of(row)
        match old.status:
            case ScheduleStatus.ACTIVE:
                return old
            case ScheduleStatus.PAUSED | ScheduleStatus.ERROR:
                following = _following(old, now)
                await past.skip_past(conn, old, now=now, reason=_idle_reason(old.status))
            case _:
                raise Conflict("a finished schedule has no further occurrence; change its recurrence instead")
        new = replace(
            old,
            status=ScheduleStatus.FINISHED if following is None else ScheduleStatus.ACTIVE,
            status_reason=None,
            next_fire_at=following,
            version=old.version + 1,
            updated_at=now,
        )
        await _write(conn, new)
        return new


def _following(schedule: Schedule, now: datetime) -> datetime | None:
    try:
        return next_fire(schedule.recurrence, now, schedule_id=schedule.id)
    except Exception as error:
        raise Conflict(f"the recurrence cannot be computed: {error}") from error


DELETE = """UPDATE schedule
   SET status = 'deleted', status_reason = NULL, next_fire_at = NULL,
       version = version + 1, updated_at = now()
 WHERE id = $1"""


async def delete(
    conn: Connection, tenant: TenantId, schedule: UUID, *, expected_version: int | None = None
) -> None:
    """Delete for good; history stays. Open runs that nobody holds are cancelled, the holders of others are
    asked to end theirs. Works for a row that cannot be understood, too. Raises Conflict as `update` does.
    """
    async with conn.transaction():
        now, row = await _lock(conn, tenant, schedule)
        version: int = row[5]
        if expected_version is not None and version != expected_version:
            raise Conflict(f"version {expected_version} was expected, but the schedule has version {version}")
        await _leave_for_good(conn, row, now)
        await conn.execute(DELETE, schedule)
        await open_runs.end_for_delete(conn, tenant, ScheduleId(schedule))


async def _leave_for_good(conn: Connection, row: tuple[Any, ...], now: datetime) -> None:
    try:
        old = schedule_of(row)
    except Conflict:  # nobody can tell any more what it owes
        return
    is_active = old.status is ScheduleStatus.ACTIVE
    reason = SkipReason.SCHEDULE_DELETED if is_active else _idle_reason(old.status)
    await past.skip_past(conn, old, now=now, reason=reason)


INSTANTS_TRIED: Final = 1_000


async def run_now(conn: Connection, tenant: TenantId, schedule: UUID) -> RunRef:
    """Make a run of this moment, beside the rule; for a paused or finished schedule too.

    Raises Conflict for a quarantined schedule and PartitionMissing when the current month is not attached.
    """
    async with conn.transaction():
        now, row = await _lock(conn, tenant, schedule)
        one = schedule_of(row)
        if one.status is ScheduleStatus.ERROR:
            raise Conflict(f"the schedule is set aside: {one.status_reason}")
        at = manual_instant(now)
        for _ in range(INSTANTS_TRIED):
            run = run_id(one.id, at)
            if await open_runs.insert_manual(conn, one, run, at):
                return RunRef(run, tenant, at, at)
            at = manual_instant(at + MICROSECOND)
        raise Conflict("too many runs of this schedule were asked for at this moment")


class RunCancel(StrEnum):
    """What became of the wish to cancel a run."""

    CANCELLED = "cancelled"
    """It has ended (now, or it was cancelled before); nothing more will be sent."""
    REQUESTED = "requested"
    """Somebody is working on it: asked to end it, which may come too late for this attempt."""


async def cancel_run(conn: Connection, tenant: TenantId, run: UUID) -> RunCancel:
    """Cancel a run: at once when nobody holds its lease, by asking the holder otherwise.

    Raises Conflict for a run that has succeeded or failed.
    """
    within = instants_of(run)
    if within is None:
        raise NotFound
    async with conn.transaction():
        found = await open_runs.lock_run(conn, tenant, run, within=within)
        match found:
            case None:
                raise NotFound
            case (_, "cancelled", _):
                return RunCancel.CANCELLED
            case (_, "succeeded" | "failed" as status, _):
                raise Conflict(f"the run has already {status}")
            case (scheduled_for, _, True):
                await open_runs.ask_to_cancel(conn, run, scheduled_for)
                return RunCancel.REQUESTED
            case (scheduled_for, _, _):
                await open_runs.cancel_run(conn, run, scheduled_for)
                return RunCancel.CANCELLED
