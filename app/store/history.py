"""The history: what ran, what each attempt did, and why an occurrence has no run. Read-only.

Every page is read by key, never by offset, and the place is the same pair that orders the rows, so each row
that was there before the walk is seen exactly once. A page looks at a bounded number of rows
(`SCAN_LIMIT`): with a filter that fits few rows it may come back short, or empty, with a place to go on
from. The bounds on `scheduled_for` open only the partitions they touch.

A run counts as running while it is open under a live lease, by the database's clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from app.domain.ids import DeliveryId, RunId, ScheduleId, TenantId, instants_of
from app.domain.run import Origin
from app.errors import NotFound
from app.store.pool import Connection, Row

SCAN_LIMIT = 10_000
"""How many rows one page looks at before it returns what it has found."""


class ShownStatus(StrEnum):
    """A run's status as its owner sees it: the stored ones, and `running` for a live lease on an open run."""

    PENDING = "pending"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `lateness` is from `scheduled_for` to the first attempt's sending; None before the first
    attempt.
    """

    id: RunId
    scheduled_for: datetime
    schedule_id: ScheduleId
    schedule_version: int
    delivery_id: DeliveryId
    origin: Origin
    status: ShownStatus
    reason: str | None
    attempt: int
    max_attempts: int
    fire_after: datetime
    expires_at: datetime
    cancel_requested_at: datetime | None
    replay_of: RunId | None
    created_at: datetime
    finished_at: datetime | None
    lateness: timedelta | None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt's evidence. `request` and `response_headers` are JSON text as stored, secrets masked at
    writing.
    """

    attempt: int
    schedule_version: int | None
    outcome: str
    maybe_delivered: bool
    error: str | None
    status_code: int | None
    started_at: datetime | None
    finished_at: datetime
    connect: timedelta | None
    first_byte: timedelta | None
    total: timedelta | None
    request: str | None
    response_headers: str | None
    response_excerpt: str | None
    worker: str


@dataclass(frozen=True, slots=True)
class DispositionRecord:
    """A gapless stretch of occurrences of one schedule that have no run, and why."""

    first_at: datetime
    last_at: datetime
    occurrences: int
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Window:
    """Instants in [from_at, to_at)."""

    from_at: datetime
    to_at: datetime


@dataclass(frozen=True, slots=True)
class Place:
    """Behind this run in newest-first order. The start of a walk is `Place(window.to_at, FIRST)`."""

    scheduled_for: datetime
    id: UUID


FIRST = UUID(int=0)


@dataclass(frozen=True, slots=True)
class RunPage:
    """What one look found; `next_place` is where the next page goes on, None at the end of the window."""

    runs: list[RunRecord]
    next_place: Place | None


# What a page shows of a run. Written once, used by both walks and by the look-up of one run.
_COLUMNS = """run.id, run.scheduled_for, run.schedule_id, run.schedule_version, run.idempotency_key,
           run.origin,
           CASE WHEN run.status IN ('pending', 'retrying') AND run.claim_expires_at >= now() THEN 'running'
                ELSE run.status END AS shown,
           run.reason, run.attempt, run.max_attempts, run.fire_after, run.expires_at, run.cancel_requested_at,
           run.replay_of, run.created_at, run.finished_at"""

# The first attempt's sending: looked up by its whole key (one partition), only for rows that are shown.
_FIRST_SENDING = """
  LEFT JOIN LATERAL (
        SELECT attempt.started_at + coalesce(attempt.connect_us, 0) * interval '1 microsecond' AS sent_at
          FROM run_attempt AS attempt
         WHERE attempt.run_id = page.id AND attempt.scheduled_for = page.scheduled_for
           AND attempt.started_at IS NOT NULL
         ORDER BY attempt.attempt
         LIMIT 1
       ) AS sending ON true"""

# For the transaction of a page. The planner does not know that the reading stops with the page, so with fresh
# statistics it would rather read and sort a whole partition than `SCAN_LIMIT` rows by index.
IN_INDEX_ORDER = """
SET LOCAL enable_sort = off;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off
"""

# Reads index job_run_history (tenant_id, scheduled_for, id) backwards. The bound on what is looked at is
# innermost; the row at it comes along even when it does not fit, as the place to go on from: asked for in a
# second statement, it would be moved by rows inserted in between, and some shown twice. Every ORDER BY is
# the order of the index, so nothing is sorted and the reading stops with the page (ORDER BY n would look at
# all rows of the bound).
LIST_TENANT_RUNS = f"""
SELECT page.*, sending.sent_at
  FROM (
        SELECT numbered.*
          FROM (
                SELECT looked.*, looked.shown = ANY ($6::text[]) AS fits,
                       row_number() OVER (ORDER BY looked.scheduled_for DESC, looked.id DESC) AS n
                  FROM (
                        SELECT {_COLUMNS}
                          FROM job_run AS run
                         WHERE run.tenant_id = $1 AND run.scheduled_for >= $2 AND run.scheduled_for < $3
                           AND (run.scheduled_for, run.id) < ($4, $5)
                         ORDER BY run.scheduled_for DESC, run.id DESC
                         LIMIT $7
                       ) AS looked
               ) AS numbered
         WHERE numbered.fits OR numbered.n = $7
         ORDER BY numbered.scheduled_for DESC, numbered.id DESC
         LIMIT $8
       ) AS page{_FIRST_SENDING}
 ORDER BY page.scheduled_for DESC, page.id DESC
"""

# The same along one schedule: the guard's index (schedule_id, scheduled_for), where an instant has one run
# at most. That the schedule is the tenant's is asked of the schedule, once: with both in one condition, the
# planner may choose the tenant's index and read everybody else's runs of the tenant to find those of one
# schedule.
LIST_SCHEDULE_RUNS = f"""
SELECT page.*, sending.sent_at
  FROM (
        SELECT numbered.*
          FROM (
                SELECT looked.*, looked.shown = ANY ($6::text[]) AS fits,
                       row_number() OVER (ORDER BY looked.scheduled_for DESC) AS n
                  FROM (
                        SELECT {_COLUMNS}
                          FROM job_run AS run
                         WHERE run.schedule_id = (SELECT id FROM schedule WHERE tenant_id = $1 AND id = $5)
                           AND run.scheduled_for >= $2 AND run.scheduled_for < $3 AND run.scheduled_for < $4
                         ORDER BY run.scheduled_for DESC
                         LIMIT $7
                       ) AS looked
               ) AS numbered
         WHERE numbered.fits OR numbered.n = $7
         ORDER BY numbered.scheduled_for DESC
         LIMIT $8
       ) AS page{_FIRST_SENDING}
 ORDER BY page.scheduled_for DESC
"""


async def list_runs(
    conn: Connection,
    tenant: TenantId,
    *,
    window: Window,
    after: Place | None,
    schedule: ScheduleId | None,
    statuses: Collection[ShownStatus],
    limit: int,
) -> RunPage:
    """Up to `limit` runs of the tenant inside `window`, newest `scheduled_for` first, behind `after`.

    `schedule` narrows to one schedule (another tenant's has no runs here); `statuses` keeps the given ones,
    and none means all. At most `SCAN_LIMIT` rows are looked at, so a page may be short although
    `next_place` is not None.
    """
    place = after or Place(window.to_at, FIRST)
    # A place inside the window is also its upper bound: partitions above it are never opened.
    to_at = min(window.to_at, place.scheduled_for + timedelta(microseconds=1))
    shown = sorted(statuses or ShownStatus)
    bounds = (tenant, window.from_at, to_at, place.scheduled_for)
    async with conn.transaction():
        await conn.execute(IN_INDEX_ORDER)
        if schedule is None:
            rows = await conn.fetch(LIST_TENANT_RUNS, *bounds, place.id, shown, SCAN_LIMIT, limit + 1)
        else:
            rows = await conn.fetch(LIST_SCHEDULE_RUNS, *bounds, schedule, shown, SCAN_LIMIT, limit + 1)
    if len(rows) > limit:
        return RunPage([_run(row) for row in rows[:limit]], _place(rows[limit - 1]))
    runs = [_run(row) for row in rows if row["fits"]]
    return RunPage(runs, _place(rows[-1]) if rows and rows[-1]["n"] == SCAN_LIMIT else None)


GET_RUN = f"""
SELECT page.*, sending.sent_at
  FROM (
        SELECT {_COLUMNS}
          FROM job_run AS run
         WHERE run.tenant_id = $1 AND run.id = $2 AND run.scheduled_for >= $3 AND run.scheduled_for < $4
       ) AS page{_FIRST_SENDING}
"""


async def get_run(conn: Connection, tenant: TenantId, run_id: UUID) -> RunRecord:
    """One run of the tenant, found in the one partition that its id names. Raises NotFound."""
    instants = instants_of(run_id)
    row = instants and await conn.fetchrow(GET_RUN, tenant, run_id, *instants)
    if not row:
        raise NotFound
    return _run(row)


LIST_ATTEMPTS = """
SELECT attempt, schedule_version, outcome, maybe_delivered, error, status_code, started_at, finished_at,
       connect_us, first_byte_us, total_us, request, response_headers, response_excerpt, worker
  FROM run_attempt
 WHERE tenant_id = $1 AND run_id = $2 AND scheduled_for >= $3 AND scheduled_for < $4
 ORDER BY attempt
"""


async def list_attempts(conn: Connection, tenant: TenantId, run_id: UUID) -> list[AttemptRecord]:
    """The evidence of the run's attempts, first to last (at most 8); empty for an unknown run and before
    the first.
    """
    instants = instants_of(run_id)
    if instants is None:
        return []
    return [_attempt(row) for row in await conn.fetch(LIST_ATTEMPTS, tenant, run_id, *instants)]


HAS_SCHEDULE = """
SELECT EXISTS (SELECT 1 FROM schedule WHERE tenant_id = $1 AND id = $2)
"""


async def require_schedule(conn: Connection, tenant: TenantId, schedule: ScheduleId) -> None:
    """Raises NotFound unless the schedule is, or was, the tenant's: the history outlives a deletion."""
    if not await conn.fetchval(HAS_SCHEDULE, tenant, schedule):
        raise NotFound


LIST_DISPOSITIONS = """
SELECT first_at, last_at, occurrences, reason, created_at
  FROM disposition
 WHERE tenant_id = $1 AND schedule_id = $2 AND first_at < $3
 ORDER BY first_at DESC
 LIMIT $4
"""


async def list_dispositions(
    conn: Connection, tenant: TenantId, schedule: ScheduleId, *, before: datetime, limit: int
) -> list[DispositionRecord]:
    """Up to `limit` stretches without runs that begin before `before`, newest first. `first_at` is their
    key.
    """
    rows = await conn.fetch(LIST_DISPOSITIONS, tenant, schedule, before, limit)
    return [
        DispositionRecord(
            row["first_at"], row["last_at"], row["occurrences"], row["reason"], row["created_at"]
        )
        for row in rows
    ]


def _place(row: Row) -> Place:
    return Place(row["scheduled_for"], row["id"])


def _run(row: Row) -> RunRecord:
    sent_at = row["sent_at"]
    return RunRecord(
        id=row["id"],
        scheduled_for=row["scheduled_for"],
        schedule_id=row["schedule_id"],
        schedule_version=row["schedule_version"],
        delivery_id=row["idempotency_key"],
        origin=Origin(row["origin"]),
        status=ShownStatus(row["shown"]),
        reason=row["reason"],
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        fire_after=row["fire_after"],
        expires_at=row["expires_at"],
        cancel_requested_at=row["cancel_requested_at"],
        replay_of=row["replay_of"],
        created_at=row["created_at"],
        finished_at=row["finished_at"],
        lateness=None if sent_at is None else sent_at - row["scheduled_for"],
    )


def _attempt(row: Row) -> AttemptRecord:
    return AttemptRecord(
        attempt=row["attempt"],
        schedule_version=row["schedule_version"],
        outcome=row["outcome"],
        maybe_delivered=row["maybe_delivered"],
        error=row["error"],
        status_code=row["status_code"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        connect=_micros(row["connect_us"]),
        first_byte=_micros(row["first_byte_us"]),
        total=_micros(row["total_us"]),
        request=row["request"],
        response_headers=row["response_headers"],
        response_excerpt=row["response_excerpt"],
        worker=row["worker"],
    )


def _micros(count: int | None) -> timedelta | None:
    return None if count is None else timedelta(microseconds=count)
