"""What an edit does to the runs of its schedule that have not ended. Always under the lock of the schedule's
row.

Lock order everywhere: schedule, then runs by (scheduled_for, id). A lease is never taken away: its run is
asked to end (`cancel_requested_at`), and its owner settles it with the evidence of the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from app.domain.ids import ScheduleId, TenantId
from app.domain.schedule import EXPIRES_AFTER_MAX, Schedule
from app.store.pool import Connection

# Future ones only, through the guard index. Never attempted and not leased: whatever has begun goes on.
LOCK_FUTURE = """SELECT id, scheduled_for, status = 'cancelled'
  FROM job_run
 WHERE schedule_id = $1
   AND scheduled_for > now()
   AND origin = 'schedule'
   AND attempt = 0
   AND claimed_by IS NULL
   AND cancel_requested_at IS NULL
   AND (status = 'pending' OR (status = 'cancelled' AND reason = 'superseded'))
 ORDER BY scheduled_for, id
   FOR UPDATE"""

SUPERSEDE = """UPDATE job_run AS r
   SET status = 'cancelled', reason = 'superseded', finished_at = now()
  FROM unnest($1::uuid[], $2::timestamptz[]) AS g(id, scheduled_for)
 WHERE r.id = g.id
   AND r.scheduled_for = g.scheduled_for"""

# Both for those that stay and for those that come back: the run carries the version that applies to it.
ADOPT = """UPDATE job_run AS r
   SET status = 'pending', reason = NULL, finished_at = NULL, schedule_version = $3, max_attempts = $4,
       expires_at = r.scheduled_for + $5::interval
  FROM unnest($1::uuid[], $2::timestamptz[]) AS g(id, scheduled_for)
 WHERE r.id = g.id
   AND r.scheduled_for = g.scheduled_for"""


@dataclass(frozen=True, slots=True)
class Future:
    """A locked run of an instant to come; superseded by an earlier edit, or still to be sent."""

    id: UUID
    scheduled_for: datetime
    is_superseded: bool


async def follow_edit(conn: Connection, schedule: Schedule, *, stays: Callable[[Future], bool]) -> None:
    """Bring the planned future runs in line with the edited `schedule`: those that stay (or come back) take
    over its version, attempts and expiry; the others are superseded.
    """
    rows = await conn.fetch(LOCK_FUTURE, schedule.id)
    future = [Future(*row) for row in rows]
    kept = [run for run in future if stays(run)]
    gone = [run for run in future if not run.is_superseded and run not in kept]
    if gone:
        await conn.execute(SUPERSEDE, *_keys(gone))
    if kept:
        await conn.execute(
            ADOPT, *_keys(kept), schedule.version, schedule.retry.max_attempts, schedule.expires_after
        )


# All open runs, overdue and retrying ones too. A run whose `expires_at` has passed is never sent again, which
# bounds the search from below; a straggler beyond it meets the deleted schedule at its next claim.
END_OPEN = """WITH open AS MATERIALIZED (
    SELECT id, scheduled_for, claimed_by IS NULL AS is_free
      FROM job_run
     WHERE tenant_id = $1
       AND schedule_id = $2
       AND scheduled_for > now() - $3::interval
       AND status IN ('pending', 'retrying')
     ORDER BY scheduled_for, id
       FOR UPDATE
)
UPDATE job_run AS r
   SET status = CASE WHEN open.is_free THEN 'cancelled' ELSE r.status END,
       reason = CASE WHEN open.is_free THEN 'schedule_deleted' ELSE r.reason END,
       finished_at = CASE WHEN open.is_free THEN now() END,
       cancel_requested_at = CASE WHEN open.is_free THEN r.cancel_requested_at
                                  ELSE coalesce(r.cancel_requested_at, now()) END
  FROM open
 WHERE r.id = open.id
   AND r.scheduled_for = open.scheduled_for"""

_LONGEST_OPEN = EXPIRES_AFTER_MAX + timedelta(days=1)


async def end_for_delete(conn: Connection, tenant: TenantId, schedule: ScheduleId) -> None:
    """Cancel every open run that nobody holds a lease on, and ask the holders to end theirs."""
    await conn.execute(END_OPEN, tenant, schedule, _LONGEST_OPEN)


LOCK_RUN = """SELECT scheduled_for, status, claimed_by IS NOT NULL
  FROM job_run
 WHERE id = $2
   AND scheduled_for >= $3
   AND scheduled_for < $4
   AND tenant_id = $1
   FOR UPDATE"""


async def lock_run(
    conn: Connection, tenant: TenantId, run: UUID, *, within: tuple[datetime, datetime]
) -> tuple[datetime, str, bool] | None:
    """Lock the tenant's run and tell its `scheduled_for`, its stored status and whether somebody holds its
    lease.
    """
    row = await conn.fetchrow(LOCK_RUN, tenant, run, *within)
    return None if row is None else (row[0], row[1], row[2])


CANCEL_RUN = """UPDATE job_run
   SET status = 'cancelled', reason = 'cancelled', finished_at = now()
 WHERE id = $1
   AND scheduled_for = $2
   AND claimed_by IS NULL
   AND status IN ('pending', 'retrying')"""


async def cancel_run(conn: Connection, run: UUID, scheduled_for: datetime) -> None:
    """End a locked, open run that nobody holds."""
    await conn.execute(CANCEL_RUN, run, scheduled_for)


ASK_TO_CANCEL = """UPDATE job_run
   SET cancel_requested_at = coalesce(cancel_requested_at, now())
 WHERE id = $1
   AND scheduled_for = $2
   AND status IN ('pending', 'retrying')"""


async def ask_to_cancel(conn: Connection, run: UUID, scheduled_for: datetime) -> None:
    """Ask the holder of a locked, open run to end it; the first asking counts."""
    await conn.execute(ASK_TO_CANCEL, run, scheduled_for)


# Sub-millisecond digits keep it apart from every occurrence; on a conflict with another manual run of this
# instant the caller tries the next microsecond.
INSERT_MANUAL = """INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version,
                     idempotency_key, origin, status, fire_after, attempt, max_attempts, expires_at, created_at)
VALUES ($1, $2, $3, $4, $5, $1, 'manual', 'pending', $2, 0, $6, $2::timestamptz + $7::interval, now())
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
RETURNING id"""


async def insert_manual(conn: Connection, schedule: Schedule, run: UUID, scheduled_for: datetime) -> bool:
    """Write a person's own run; False when the schedule has a run of this very instant."""
    found = await conn.fetchval(
        INSERT_MANUAL,
        run,
        scheduled_for,
        schedule.tenant_id,
        schedule.id,
        schedule.version,
        schedule.retry.max_attempts,
        schedule.expires_after,
    )
    return found is not None


def _keys(runs: Sequence[Future]) -> tuple[list[UUID], list[datetime]]:
    return [run.id for run in runs], [run.scheduled_for for run in runs]
