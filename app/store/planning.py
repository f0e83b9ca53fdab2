"""From due schedules to runs: the planner's statements. Batch-first: arrays in, one statement per verb.

Two independent guards keep an occurrence from being lost or planned twice: the row lock together with the
guarded advance of `next_fire_at` in one transaction, and UNIQUE (schedule_id, scheduled_for).

`lock_due` and `lock_again` never wait (SKIP LOCKED): a schedule that is being edited or planned elsewhere is
simply not ours this time. Everything here but `quarantine` runs in the planner's transaction on connections
with PLAN_GUARDS; edits use `insert_runs` and `record_skipped` too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from app.domain.ids import RunId, ScheduleId, TenantId
from app.domain.plan import Skipped
from app.domain.run import RunRef
from app.store.pool import Connection


# The three kinds of rows are tuples in their statements' column order: a hundred thousand of each pass through here in
# the seconds before a full hour.
class DueRow(NamedTuple):
    """A locked schedule as it was read. `recurrence` and `retry` are the stored JSON texts, good as memo
    keys.
    """

    id: ScheduleId
    tenant_id: TenantId
    version: int
    next_fire_at: datetime
    recurrence: str
    retry: str
    misfire: str
    expires_after: timedelta


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of due times around the database's now: later than `now - reach`, up to `now + ahead`."""

    reach: timedelta
    ahead: timedelta


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the due order (next_fire_at, id)."""

    next_fire_at: datetime
    id: UUID


LEFT_END: Final = Place(datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))
EVER: Final = timedelta(days=500_000)
"""A reach before everything that has a run id, and still inside PostgreSQL's and Python's calendars."""


@dataclass(frozen=True, slots=True)
class Locked:
    """Rows in due order, and the database's now of the transaction; None when there are none."""

    now: datetime | None
    rows: list[DueRow]


# One lower bound, not two: beside `next_fire_at > now() - reach` the index scan starts at whichever bound stands first
# in the text, and passes 95,000 entries it need not see (24 ms instead of 1.6). The interval is clamped because one
# beyond Python's range would fail the whole batch at decoding, every time.
LOCK_DUE = """SELECT now(), s.id, s.tenant_id, s.version, s.next_fire_at, s.recurrence::text, s.retry::text,
       s.misfire, least(s.expires_after, interval '1000 days')
  FROM schedule AS s
 WHERE s.status = 'active'
   AND (s.next_fire_at, s.id) > (greatest($1::timestamptz, now() - $3::interval), $2::uuid)
   AND s.next_fire_at <= now() + $4::interval
 ORDER BY s.next_fire_at, s.id
 LIMIT $5
   FOR UPDATE SKIP LOCKED"""


async def lock_due(conn: Connection, band: Band, *, behind: Place = LEFT_END, limit: int) -> Locked:
    """Lock at most `limit` active schedules of the band, oldest first, behind a place in the due order."""
    rows = await conn.fetch(LOCK_DUE, behind.next_fire_at, behind.id, band.reach, band.ahead, limit)
    due = [DueRow._make(row[1:]) for row in rows]
    due.sort(key=lambda row: (row.next_fire_at, row.id.int))  # a row that moved comes out of order
    return Locked(rows[0][0] if rows else None, due)


LOCK_AGAIN = """SELECT s.id
  FROM unnest($1::uuid[], $2::int[], $3::timestamptz[]) AS g(id, version, next_fire_at)
  JOIN schedule AS s ON s.id = g.id
 WHERE s.status = 'active'
   AND s.version = g.version
   AND s.next_fire_at = g.next_fire_at
   FOR UPDATE OF s SKIP LOCKED"""


async def lock_again(conn: Connection, rows: Sequence[DueRow]) -> set[ScheduleId]:
    """Lock those of `rows` that are still as they were read, in a new transaction; the others are not ours
    any more.
    """
    found = await conn.fetch(
        LOCK_AGAIN,
        [row.id for row in rows],
        [row.version for row in rows],
        [row.next_fire_at for row in rows],
    )
    return {ScheduleId(row[0]) for row in found}


class NewRun(NamedTuple):
    """A run to be: due at its instant, never attempted."""

    id: RunId
    scheduled_for: datetime
    tenant_id: TenantId
    schedule_id: ScheduleId
    schedule_version: int
    max_attempts: int
    expires_at: datetime


# Which ones are new is told only when not all are: a thousand ids on the way back cost as much as writing a tenth of
# their rows. The same goes for ADVANCE.
INSERT_RUNS = """WITH new AS (
INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version,
                     idempotency_key, origin, status, fire_after, attempt, max_attempts, expires_at, created_at)
SELECT g.id, g.scheduled_for, g.tenant_id, g.schedule_id, g.schedule_version, g.id,
       'schedule', 'pending', g.scheduled_for, 0, g.max_attempts, g.expires_at, now()
  FROM unnest($1::uuid[], $2::timestamptz[], $3::uuid[], $4::uuid[], $5::int[], $6::smallint[],
              $7::timestamptz[])
       AS g(id, scheduled_for, tenant_id, schedule_id, schedule_version, max_attempts, expires_at)
    ON CONFLICT (schedule_id, scheduled_for) DO NOTHING
RETURNING id
)
SELECT count(*), CASE WHEN count(*) < $8 THEN array_agg(id) END FROM new"""


async def insert_runs(conn: Connection, runs: Sequence[NewRun]) -> list[RunRef]:
    """Write the runs of occurrences; returns the new ones in order. Occurrences that have their run already
    are left.

    Raises RowRefused for data the database refuses and PartitionMissing for a month that is not attached; the
    whole batch is refused then.
    """
    if not runs:
        return []
    ordered = sorted(runs, key=lambda run: (run.scheduled_for, run.id.int))
    [(count, ids)] = await conn.fetch(INSERT_RUNS, *zip(*ordered, strict=True), len(ordered))
    if count < len(ordered):
        new = set(ids or ())
        ordered = [run for run in ordered if run.id in new]
    return [RunRef(run.id, run.tenant_id, run.scheduled_for, run.scheduled_for) for run in ordered]


class Advance(NamedTuple):
    """How one schedule's pointer moves: from the value read to a later one, or to None (finished)."""

    id: ScheduleId
    read: datetime
    next_fire_at: datetime | None
    last_fire_at: datetime | None


# `updated_at` and `version` speak of changes by people; the planner's progress is neither.
ADVANCE = """WITH moved AS (
UPDATE schedule AS s
   SET next_fire_at = g.next_fire_at,
       last_fire_at = coalesce(g.last_fire_at, s.last_fire_at),
       status = CASE WHEN g.next_fire_at IS NULL THEN 'finished' ELSE s.status END
  FROM unnest($1::uuid[], $2::timestamptz[], $3::timestamptz[], $4::timestamptz[])
       AS g(id, read, next_fire_at, last_fire_at)
 WHERE s.id = g.id
   AND s.status = 'active'
   AND s.next_fire_at = g.read
   AND (g.next_fire_at IS NULL OR g.next_fire_at > g.read)
RETURNING s.id
)
SELECT count(*), CASE WHEN count(*) < $5 THEN array_agg(id) END FROM moved"""


async def advance(conn: Connection, advances: Sequence[Advance]) -> set[ScheduleId]:
    """Move the pointers forward, never back; returns the schedules that really moved."""
    if not advances:
        return set()
    ordered = sorted(advances, key=lambda one: one.id.int)
    [(count, ids)] = await conn.fetch(ADVANCE, *zip(*ordered, strict=True), len(ordered))
    return {one.id for one in ordered} if count == len(ordered) else set(ids or ())


@dataclass(frozen=True, slots=True)
class NewDisposition:
    """A stretch of one schedule's occurrences that get no run."""

    tenant_id: TenantId
    schedule_id: ScheduleId
    skipped: Skipped


# A conflict needs a clock that went back and an edit that moved the pointer with it; the longer stretch is
# kept.
RECORD_SKIPPED = """INSERT INTO disposition AS d (tenant_id, schedule_id, first_at, last_at, occurrences,
                             reason, created_at)
SELECT g.tenant_id, g.schedule_id, g.first_at, g.last_at, g.occurrences, g.reason, now()
  FROM unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::timestamptz[], $5::int[], $6::text[])
       AS g(tenant_id, schedule_id, first_at, last_at, occurrences, reason)
    ON CONFLICT (schedule_id, first_at) DO UPDATE
   SET last_at = greatest(d.last_at, excluded.last_at),
       occurrences = greatest(d.occurrences, excluded.occurrences)"""


async def record_skipped(conn: Connection, dispositions: Sequence[NewDisposition]) -> None:
    """Write down why occurrences have no run. A (schedule, first_at) stands in `dispositions` at most
    once.
    """
    ordered = sorted(dispositions, key=lambda one: (one.schedule_id, one.skipped.first_at))
    await conn.execute(
        RECORD_SKIPPED,
        [one.tenant_id for one in ordered],
        [one.schedule_id for one in ordered],
        [one.skipped.first_at for one in ordered],
        [one.skipped.last_at for one in ordered],
        [one.skipped.count for one in ordered],
        [one.skipped.reason.value for one in ordered],
    )


# Guarded by everything that was read: a schedule that was mended or planned meanwhile is not touched.
QUARANTINE = """UPDATE schedule AS s
   SET status = 'error', status_reason = g.reason, version = s.version + 1, updated_at = now()
  FROM unnest($1::uuid[], $2::int[], $3::timestamptz[], $4::text[]) AS g(id, version, next_fire_at, reason)
 WHERE s.id = g.id
   AND s.status = 'active'
   AND s.version = g.version
   AND s.next_fire_at = g.next_fire_at
RETURNING s.id"""


async def quarantine(
    conn: Connection, reasons: Mapping[ScheduleId, str], rows: Collection[DueRow]
) -> set[ScheduleId]:
    """Set aside those of `rows` that have a reason, visibly; returns the schedules that really were."""
    ordered = sorted((row for row in rows if row.id in reasons), key=lambda row: row.id)
    found = await conn.fetch(
        QUARANTINE,
        [row.id for row in ordered],
        [row.version for row in ordered],
        [row.next_fire_at for row in ordered],
        [_storable(reasons[row.id]) for row in ordered],
    )
    return {ScheduleId(row[0]) for row in found}


DATABASE_NOW = "SELECT now()"


async def database_now(conn: Connection) -> datetime:
    """The clock that decides what is due; the transaction's beginning when one is open."""
    now: datetime = await conn.fetchval(DATABASE_NOW)
    return now


def _storable(reason: str) -> str:
    """The reason quotes whatever made the schedule unplannable; what PostgreSQL refuses must not get in the
    way.
    """
    return reason.encode("utf-8", "replace").decode().replace("\0", "�")[:500]
