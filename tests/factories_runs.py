"""Runs, schedules and leases for tests, written straight into the tables.

`scheduled_for` lies a little ahead of now, so that its month is always there; what makes a run due is `fire_after`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from uuid import UUID, uuid4

from app.claim.grant import Grants
from app.domain import retry as retries
from app.domain import target as targets
from app.domain.ids import EPOCH, MILLISECOND, ScheduleId, TenantId, run_id
from app.domain.outcome import Answer, Delivered, Outcome, Sent, Timing
from app.domain.retry import RetryPolicy
from app.domain.run import ClaimedRun, Evidence, Lease, RunRef, Settled, Settlement
from app.domain.target import Target
from app.store import claims
from app.store.claims import Grant
from app.store.pool import Connection

TTL = timedelta(seconds=30)
SECOND = timedelta(seconds=1)
TARGET = Target("POST", "http://127.0.0.1:9/", (), None)

_number = count(1)


@dataclass(frozen=True, slots=True)
class SeededSchedule:
    id: ScheduleId
    tenant_id: TenantId


async def seed_schedule(
    conn: Connection,
    *,
    tenant: TenantId | None = None,
    status: str = "active",
    overlap: str = "allow",
    target: Target | str = TARGET,
    retry: RetryPolicy | None = None,
) -> SeededSchedule:
    """A schedule that the planner leaves alone (its next fire is a year away). `target` may be any JSON text."""
    seeded = SeededSchedule(ScheduleId(uuid4()), tenant or TenantId(uuid4()))
    await conn.execute(
        """INSERT INTO schedule (id, tenant_id, name, status, version, recurrence, target, retry, misfire, overlap,
                                 expires_after, next_fire_at, created_at, updated_at)
           VALUES ($1, $2, 'seeded', $3, 1, '{}', $4::jsonb, $5::jsonb, 'fire_once', $6, '1 day',
                   now() + interval '1 year', now(), now())""",
        seeded.id,
        seeded.tenant_id,
        status,
        target if isinstance(target, str) else targets.to_json(target),
        retries.to_json(retry or RetryPolicy()),
        overlap,
    )
    return seeded


async def seed_runs(
    conn: Connection,
    schedule: SeededSchedule,
    amount: int,
    *,
    due_ago: timedelta = SECOND,
    apart: timedelta = timedelta(),
    attempt: int = 0,
    max_attempts: int = 5,
    expires_in: timedelta = timedelta(days=1),
) -> list[RunRef]:
    """`amount` open runs, the first due since `due_ago` and each next one `apart` later. In claim order."""
    now: datetime = await conn.fetchval("SELECT date_trunc('second', now())")
    refs: list[RunRef] = []
    for place in range(amount):
        at = now + next(_number) * MILLISECOND
        fire_after = now - due_ago + place * apart
        refs.append(RunRef(run_id(schedule.id, at), schedule.tenant_id, at, fire_after))
    await conn.copy_records_to_table(
        "job_run",
        columns=_COPIED,
        records=[
            (
                ref.id, ref.scheduled_for, ref.tenant_id, schedule.id, 1, ref.id, "schedule",
                "retrying" if attempt else "pending", ref.fire_after, attempt, max_attempts, now + expires_in, now,
            )
            for ref in refs
        ],
    )  # fmt: skip
    return sorted(refs, key=lambda ref: (ref.fire_after, ref.id))


_COPIED = (
    "id", "scheduled_for", "tenant_id", "schedule_id", "schedule_version", "idempotency_key", "origin",
    "status", "fire_after", "attempt", "max_attempts", "expires_at", "created_at",
)  # fmt: skip


async def seed_run(conn: Connection, schedule: SeededSchedule | None = None, **how: object) -> RunRef:
    """One due run, of a schedule of its own unless one is given; `how` as in `seed_runs`."""
    schedule = schedule or await seed_schedule(conn)
    return (await seed_runs(conn, schedule, 1, **how))[0]  # type: ignore[arg-type]


async def set_run(conn: Connection, ref: RunRef, **columns: object) -> None:
    """Overwrite columns of a run."""
    names = ", ".join(f"{name} = ${place}" for place, name in enumerate(columns, start=3))
    await conn.execute(
        f"UPDATE job_run SET {names} WHERE id = $1 AND scheduled_for = $2",
        ref.id,
        ref.scheduled_for,
        *columns.values(),
    )


async def expire(conn: Connection, *refs: RunRef) -> None:
    """Let the leases on these runs run out; on all runs when none is named."""
    await conn.execute(
        """UPDATE job_run SET claim_expires_at = now() - interval '1 millisecond'
            WHERE claimed_by IS NOT NULL AND ($2 OR id = ANY($1::uuid[]))""",
        [ref.id for ref in refs],
        not refs,
    )


async def request_cancel(conn: Connection, ref: RunRef) -> None:
    await conn.execute("UPDATE job_run SET cancel_requested_at = now() WHERE id = $1", ref.id)


async def run_row(conn: Connection, ref: RunRef) -> dict[str, object]:
    row = await conn.fetchrow("SELECT * FROM job_run WHERE id = $1", ref.id)
    assert row is not None
    return dict(row)


async def attempt_rows(conn: Connection, ref: RunRef) -> list[dict[str, object]]:
    rows = await conn.fetch("SELECT * FROM run_attempt WHERE run_id = $1 ORDER BY attempt", ref.id)
    return [dict(row) for row in rows]


async def everything(conn: Connection) -> list[tuple[str, ...]]:
    """All runs and attempts, with their row versions: two equal answers mean that nothing was written between."""
    rows = await conn.fetch(
        """SELECT ctid::text, xmin::text, to_jsonb(r)::text FROM job_run AS r
            UNION ALL
           SELECT ctid::text, xmin::text, to_jsonb(a)::text FROM run_attempt AS a
            ORDER BY 3"""
    )
    return [tuple(row) for row in rows]


def grant(replica: str = "one", *, ttl: timedelta = TTL) -> Grant:
    """The terms of one claim, as a process of its own with this name would make them."""
    return Grants(replica, ttl).new()


async def claim(
    conn: Connection, replica: str = "one", *, limit: int = 100, ttl: timedelta = TTL
) -> list[ClaimedRun]:
    """Claim oldest first, from the left end."""
    return await claims.claim_due(conn, grant(replica, ttl=ttl), limit=limit)


async def claim_one(conn: Connection, replica: str = "one", *, ttl: timedelta = TTL) -> ClaimedRun:
    [run] = await claim(conn, replica, limit=1, ttl=ttl)
    return run


def leases_of(runs: Iterable[ClaimedRun]) -> list[Lease]:
    return [run.lease for run in runs]


ANSWER = Answer(200, (("content-type", "text/plain"),), "thanks", truncated=False)
DELIVERED = Delivered(ANSWER, Timing(None, None, timedelta(milliseconds=3)))


def evidence(outcome: Outcome = DELIVERED, *, worker: str = "one", started_at: datetime = EPOCH) -> Evidence:
    return Evidence(
        outcome=outcome,
        sent=Sent("POST", "http://127.0.0.1:9/", (("a", "b"),), 0),
        schedule_version=1,
        started_at=started_at,
        finished_at=started_at + SECOND,
        worker=worker,
    )


def settled(lease: Lease, settlement: Settlement, proof: Evidence | None = None) -> Settled:
    return Settled(lease, settlement, proof)


async def seed_backlog(
    conn: Connection, amount: int, *, tenants: int, months: Sequence[datetime], schedule: UUID | None = None
) -> None:
    """`amount` due runs of `tenants` tenants, spread over the months that these instants lie in. Quick."""
    await conn.execute(
        """INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version, idempotency_key, origin,
                                status, fire_after, attempt, max_attempts, expires_at, created_at)
           SELECT gen_random_uuid(), ($3::timestamptz[])[1 + g % cardinality($3)] + g * interval '1 millisecond',
                  lpad(to_hex(1 + g % $2), 32, '0')::uuid, coalesce($4, gen_random_uuid()), 1, gen_random_uuid(),
                  'schedule', 'pending', now() - interval '1 minute', 0, 5, now() + interval '1 day', now()
             FROM generate_series(1, $1::int) AS g""",
        amount,
        tenants,
        list(months),
        schedule,
    )


def tenant_number(number: int) -> TenantId:
    """The tenants of `seed_backlog`, numbered from 1."""
    return TenantId(UUID(int=number))
