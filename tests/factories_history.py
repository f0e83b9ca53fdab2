"""Rows of the history, written directly: what the planner and the executors would have left behind."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from app.domain.ids import ScheduleId, TenantId, run_id
from app.store.partitions import Month, ensure_month
from app.store.pool import Connection

INSERT_RUNS = """
INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version, idempotency_key, origin, status,
                     fire_after, attempt, max_attempts, expires_at, created_at, finished_at)
SELECT run.id, run.scheduled_for, $1, run.schedule_id, 1, run.id,
       CASE WHEN extract(microseconds FROM run.scheduled_for)::bigint % 1000 = 0 THEN 'schedule' ELSE 'manual' END,
       $2, run.scheduled_for, 0, 5, run.scheduled_for + interval '1 day', now(),
       CASE WHEN $2 IN ('pending', 'retrying') THEN NULL ELSE run.scheduled_for + interval '1 second' END
  FROM unnest($3::uuid[], $4::timestamptz[], $5::uuid[]) AS run (id, scheduled_for, schedule_id)
"""


async def add_runs(
    conn: Connection,
    tenant: TenantId,
    occurrences: Sequence[tuple[ScheduleId, datetime]],
    *,
    status: str = "succeeded",
) -> list[UUID]:
    """Adds one run per (schedule, instant), in one statement; returns their ids in the same order."""
    for month in {Month.of(instant) for _, instant in occurrences}:
        await ensure_month(conn, month)
    ids = [run_id(schedule, instant) for schedule, instant in occurrences]
    instants = [instant for _, instant in occurrences]
    schedules = [schedule for schedule, _ in occurrences]
    await conn.execute(INSERT_RUNS, tenant, status, ids, instants, schedules)
    return list(ids)


async def add_schedule(conn: Connection, tenant: TenantId, schedule: ScheduleId) -> None:
    """Adds a deleted schedule: enough for its history, and nothing that a planner would touch."""
    await conn.execute(
        """
        INSERT INTO schedule (id, tenant_id, name, status, version, recurrence, target, retry, misfire, overlap,
                              expires_after, created_at, updated_at)
        VALUES ($2, $1, 'gone', 'deleted', 1, '{}', '{}', '{}', 'skip', 'allow', '1 day', now(), now())
        """,
        tenant,
        schedule,
    )


async def lease(conn: Connection, run: UUID, *, until: timedelta) -> None:
    """Puts the run under a lease that ends `until` from the database's now (negative: it has run out)."""
    await conn.execute(
        "UPDATE job_run SET claimed_by = 'replica-1', claim_expires_at = now() + $2, attempt = 1 WHERE id = $1",
        run,
        until,
    )


async def add_attempt(
    conn: Connection, tenant: TenantId, run: UUID, scheduled_for: datetime, number: int, *, late: timedelta
) -> None:
    """Adds the evidence of one answered attempt that began `late` after the instant and connected in 2 ms."""
    await conn.execute(
        """
        INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, schedule_version, outcome,
                                 maybe_delivered, status_code, started_at, finished_at, connect_us, first_byte_us,
                                 total_us, request, response_headers, response_excerpt, worker, lease_token)
        VALUES ($1, $2, $3, $4, 1, 'rejected', true, 503, $5, $6, 2000, 3500, 4250,
                '{"method": "POST", "url": "https://example.com/", "headers": {"X-Foo": "bar"}, "body_bytes": 2}',
                '{"content-type": "text/plain"}', 'try later', 'replica-1', 'lease-token-canary-93b')
        """,
        run,
        scheduled_for,
        number,
        tenant,
        scheduled_for + late,
        scheduled_for + late + timedelta(milliseconds=5),
    )
