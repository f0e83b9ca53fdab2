"""Many schedules and runs at once, written in one statement each: what a person would have made over the API."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain import target as targets
from app.domain.ids import TenantId
from app.domain.recurrence import Once
from app.domain.retry import RetryPolicy
from app.domain.target import Target
from app.store.pool import Connection
from tests.factories_runs import tenant_number

QUICK = RetryPolicy(max_attempts=5, base=timedelta(seconds=1), cap=timedelta(seconds=2))

# The tenants are those of `tests.factories_runs.tenant_number`.
_ONE_OFFS = """
INSERT INTO schedule (id, tenant_id, name, status, version, recurrence, target, retry, misfire, overlap,
                      expires_after, next_fire_at, created_at, updated_at)
SELECT gen_random_uuid(), lpad(to_hex($7 + g % $2), 32, '0')::uuid, 'one-off ' || g, 'active', 1, $3::jsonb,
       $4::jsonb, $5::jsonb, 'fire_once', 'allow', '1 day', $6, now(), now()
  FROM generate_series(1, $1::int) AS g
"""


async def seed_one_offs(
    conn: Connection,
    count: int,
    *,
    url: str,
    at: datetime,
    tenants: int = 1,
    first_tenant: int = 1,
    retry: RetryPolicy = QUICK,
) -> None:
    """`count` schedules that all fire once, at the same whole millisecond, dealt out to `tenants` tenants."""
    await conn.execute(
        _ONE_OFFS,
        count,
        tenants,
        json.dumps(recurrences.to_json(Once(at))),
        targets.to_json(Target("POST", url, (), "due")),
        retries.to_json(retry),
        at,
        first_tenant,
    )


async def soon(conn: Connection, *, ahead: timedelta = timedelta()) -> datetime:
    """The database's now and `ahead`, cut to the second before."""
    found: datetime = await conn.fetchval("SELECT date_trunc('second', now() + $1::interval)", ahead)
    return found


# The occurrences are a millisecond apart and lie ahead, so that their month is there; `fire_after` makes them due.
_DUE = """
WITH one AS (
    INSERT INTO schedule (id, tenant_id, name, status, version, recurrence, target, retry, misfire, overlap,
                          expires_after, next_fire_at, created_at, updated_at)
    SELECT gen_random_uuid(), lpad(to_hex($1 + t), 32, '0')::uuid, 'due', 'active', 1,
           '{"kind": "every", "every_seconds": 31536000, "anchor": "2026-01-01T00:00:00Z"}', $4::jsonb, $5::jsonb,
           'skip', 'allow', '1 day', now() + interval '300 days', now(), now()
      FROM generate_series(0, $2::int - 1) AS t
    RETURNING id, tenant_id
)
INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version, idempotency_key, origin, status,
                     fire_after, attempt, max_attempts, expires_at, created_at)
SELECT made.id, made.at, made.tenant_id, made.schedule_id, 1, made.id, 'schedule', 'pending', $6, 0, 5,
       now() + interval '1 day', now()
  FROM (SELECT gen_random_uuid() AS id, one.tenant_id, one.id AS schedule_id,
               date_trunc('second', now()) + g * interval '1 millisecond' AS at
          FROM one CROSS JOIN generate_series(1, $3::int) AS g) AS made
"""


async def seed_due(
    conn: Connection,
    *,
    tenants: int,
    each: int,
    url: str,
    due_since: datetime,
    first_tenant: int = 1,
    retry: RetryPolicy = QUICK,
) -> list[TenantId]:
    """Planned runs: `tenants` tenants, numbered from `first_tenant`, with one schedule and `each` due runs of it.

    Their ids do not tell their instants, so the API does not find them one by one.
    """
    await conn.execute(
        _DUE,
        first_tenant,
        tenants,
        each,
        targets.to_json(Target("POST", url, (), "due")),
        retries.to_json(retry),
        due_since,
    )
    return [tenant_number(first_tenant + place) for place in range(tenants)]
