"""Taking runs under a lease: the claim statements and what undoes a claim of unknown outcome.

A claim is one statement and its own transaction. It never raises on data: runs that may not be sent any more
(attempts spent, expired, cancelled, schedule inactive) are leased and returned like the others, and their new owner
settles them with the reason. Expired leases are recovered on the way, with evidence for the attempt that was lost.

Everything here runs on connections with `PLAN_GUARDS`, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from app.boottime import boottime
from app.domain.ids import EPOCH, TenantId
from app.domain.run import ClaimedRun, Lease, Origin, RunRef
from app.store.pool import Connection, Row

# The record's predicate (ADR 0033): written once, used by every claim. The partial indexes carry its status part.
CLAIMABLE = """status IN ('pending', 'retrying')
       AND fire_after <= now() - $3::interval
       AND (claim_expires_at IS NULL OR claim_expires_at < now())"""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in the due order; a claim continues behind the last row that one *returned*, never one it skipped."""

    fire_after: datetime
    id: UUID


LEFT_END = Cursor(EPOCH, UUID(int=0))


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant is asked for in a ring claim: at most `limit` runs behind `behind`."""

    tenant_id: TenantId
    limit: int
    behind: Cursor


@dataclass(frozen=True, slots=True)
class Grant:
    """The terms of one claim: its token, the lease's length, and the boot-time second just before it is sent."""

    token: str
    ttl: timedelta
    asked_at: float


# `due` is MATERIALIZED so that the UPDATE can never run it twice and lock more rows than LIMIT. `lost` is the evidence
# of attempts whose lease ran out. The schedule is joined outside the LIMIT: inside, a head of 50,000 paused runs cost
# 173 ms per claim. A run whose attempts are spent is leased without spending another, so that nothing can be refused.
_LEASE = """, lost AS (
    INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, schedule_version, outcome, maybe_delivered,
                             error, finished_at, worker, lease_token)
    SELECT id, scheduled_for, attempt, tenant_id, schedule_version, 'lease_lost', true,
           'the lease ended before the attempt was settled', clock_timestamp(), split_part(claimed_by, '/', 1),
           claimed_by
      FROM due
     WHERE claimed_by IS NOT NULL
        ON CONFLICT (run_id, scheduled_for, attempt) DO NOTHING
)
UPDATE job_run AS r
   SET claimed_by = $1,
       claim_expires_at = clock_timestamp() + $2::interval,
       attempt = CASE WHEN r.attempt < r.max_attempts THEN r.attempt + 1 ELSE r.attempt END
  FROM due
  LEFT JOIN schedule AS s ON s.id = due.schedule_id
 WHERE r.id = due.id
   AND r.scheduled_for = due.scheduled_for
RETURNING r.id, r.tenant_id, r.scheduled_for, r.fire_after, r.attempt, r.schedule_id, r.origin, r.idempotency_key,
          r.max_attempts, s.version AS schedule_version, s.status AS schedule_status,
          due.attempt >= r.max_attempts AS is_exhausted,
          r.expires_at <= now() AS is_expired,
          r.cancel_requested_at IS NOT NULL AS is_cancel_requested,
          clock_timestamp() AS granted_at"""

_DUE_COLUMNS = "id, scheduled_for, tenant_id, schedule_id, schedule_version, attempt, claimed_by"

CLAIM_DUE = f"""WITH due AS MATERIALIZED (
    SELECT {_DUE_COLUMNS}
      FROM job_run
     WHERE {CLAIMABLE}
       AND (fire_after, id) > ($4::timestamptz, $5::uuid)
     ORDER BY fire_after, id
     LIMIT $6
       FOR UPDATE SKIP LOCKED
){_LEASE}"""


async def claim_due(
    conn: Connection,
    grant: Grant,
    *,
    limit: int,
    behind: Cursor = LEFT_END,
    overdue_by: timedelta = timedelta(),
) -> list[ClaimedRun]:
    """Lease at most `limit` due runs, oldest first, behind a cursor; only runs due for at least `overdue_by`."""
    rows = await conn.fetch(
        CLAIM_DUE, grant.token, grant.ttl, overdue_by, behind.fire_after, behind.id, limit
    )
    return _claimed(rows, grant)


CLAIM_RING = f"""WITH want AS (
    SELECT * FROM unnest($4::uuid[], $5::int[], $6::timestamptz[], $7::uuid[]) AS w(tenant, k, fire_after, id)
), due AS MATERIALIZED (
    SELECT picked.*
      FROM want
     CROSS JOIN LATERAL (
        SELECT {_DUE_COLUMNS}
          FROM job_run
         WHERE tenant_id = want.tenant
           AND {CLAIMABLE}
           AND (fire_after, id) > (want.fire_after, want.id)
         ORDER BY fire_after, id
         LIMIT want.k
           FOR UPDATE SKIP LOCKED
     ) AS picked
){_LEASE}"""


async def claim_ring(
    conn: Connection, grant: Grant, *, shares: Sequence[Share], overdue_by: timedelta = timedelta()
) -> list[ClaimedRun]:
    """Lease each tenant's share of its due runs in one statement. A tenant stands in `shares` at most once."""
    rows = await conn.fetch(
        CLAIM_RING,
        grant.token,
        grant.ttl,
        overdue_by,
        [share.tenant_id for share in shares],
        [share.limit for share in shares],
        [share.behind.fire_after for share in shares],
        [share.behind.id for share in shares],
    )
    return _claimed(rows, grant)


CLAIM_HINTED = f"""WITH hint AS (
    SELECT * FROM unnest($4::uuid[], $5::timestamptz[], $6::uuid[]) AS h(id, scheduled_for, tenant_id)
), due AS MATERIALIZED (
    SELECT picked.*
      FROM hint
     CROSS JOIN LATERAL (
        SELECT {_DUE_COLUMNS}
          FROM job_run
         WHERE id = hint.id
           AND scheduled_for = hint.scheduled_for
           AND tenant_id = hint.tenant_id
           AND {CLAIMABLE}
           FOR UPDATE SKIP LOCKED
     ) AS picked
){_LEASE}"""


async def claim_hinted(conn: Connection, grant: Grant, *, refs: Iterable[RunRef]) -> list[ClaimedRun]:
    """Lease those of `refs` that are due and free. Stale, early and doubled refs simply claim nothing, and one that
    names another tenant than the run's neither: the caller has counted it against that tenant's cap."""
    asked = sorted({(ref.scheduled_for, ref.id, ref.tenant_id) for ref in refs})
    rows = await conn.fetch(
        CLAIM_HINTED,
        grant.token,
        grant.ttl,
        timedelta(),
        [run for _, run, _ in asked],
        [at for at, _, _ in asked],
        [tenant for _, _, tenant in asked],
    )
    return _claimed(rows, grant)


# Ordered by all columns of the partial index although a tenant is all that is asked for: nothing but that index has
# this order. By tenant alone the history index would do as well, and walk over everything that has ended.
DUE_TENANTS = f"""WITH RECURSIVE ring AS (
    (SELECT tenant_id, 1 AS place
       FROM job_run
      WHERE status IN ('pending', 'retrying') AND tenant_id > $1::uuid
      ORDER BY tenant_id, fire_after, id
      LIMIT 1)
    UNION ALL
    SELECT (SELECT r.tenant_id
              FROM job_run AS r
             WHERE r.status IN ('pending', 'retrying') AND r.tenant_id > ring.tenant_id
             ORDER BY r.tenant_id, r.fire_after, r.id
             LIMIT 1),
           ring.place + 1
      FROM ring
     WHERE ring.tenant_id IS NOT NULL AND ring.place < $2
)
SELECT ring.tenant_id,
       (SELECT true
          FROM job_run
         WHERE tenant_id = ring.tenant_id
           AND {CLAIMABLE}
         ORDER BY fire_after, id
         LIMIT 1) IS TRUE AS is_due
  FROM ring
 WHERE ring.tenant_id IS NOT NULL"""


@dataclass(frozen=True, slots=True)
class TenantPage:
    """One page of the walk over tenants with open runs: those with due ones, and where the walk has come to."""

    due: list[TenantId]
    last: UUID | None


async def due_tenants(
    conn: Connection, *, behind: UUID, limit: int, overdue_by: timedelta = timedelta()
) -> TenantPage:
    """Walk `limit` tenants with open runs behind tenant `behind` by a loose index scan; `last` is None at the end."""
    rows = await conn.fetch(DUE_TENANTS, behind, limit, overdue_by)
    return TenantPage(
        due=[TenantId(row["tenant_id"]) for row in rows if row["is_due"]],
        last=rows[-1]["tenant_id"] if len(rows) == limit else None,
    )


# Its cost is what has become due since the last look, not what waits.
NEWLY_DUE = """SELECT now() - $1::interval, count(*) = $3, array_agg(DISTINCT fresh.tenant_id)
  FROM (SELECT tenant_id
          FROM job_run
         WHERE status IN ('pending', 'retrying')
           AND fire_after > $2::timestamptz
           AND fire_after <= now() - $1::interval
         ORDER BY fire_after, id
         LIMIT $3) AS fresh"""


@dataclass(frozen=True, slots=True)
class NewlyDue:
    """Tenants with runs that became due after `since` and up to `until`, which the next look starts from.

    `is_cut` when there may be more of them.
    """

    tenants: list[TenantId]
    until: datetime
    is_cut: bool


async def newly_due(
    conn: Connection, *, since: datetime | None, limit: int, overdue_by: timedelta = timedelta()
) -> NewlyDue:
    """Look at the first `limit` runs that became due after `since`; with None at none, for the time to start from."""
    [(until, is_cut, tenants)] = await conn.fetch(NEWLY_DUE, overdue_by, since, limit)
    return NewlyDue([TenantId(tenant) for tenant in tenants or ()], until, is_cut)


NEXT_DUE = """SELECT fire_after - now()
  FROM job_run
 WHERE status IN ('pending', 'retrying')
   AND fire_after > now()
 ORDER BY fire_after
 LIMIT 1"""


async def next_due_in(conn: Connection) -> timedelta | None:
    """How long until the next open run becomes due; None when nothing is planned."""
    wait: timedelta | None = await conn.fetchval(NEXT_DUE)
    return wait


# The attempt that a claim spent is given back, unless it has its evidence already: then the claim met spent attempts
# and spent none, and the number must not be sent a second time.
ATTEMPT_GIVEN_BACK = """r.attempt - CASE WHEN EXISTS (SELECT 1
                                            FROM run_attempt AS a
                                           WHERE a.run_id = r.id
                                             AND a.scheduled_for = r.scheduled_for
                                             AND a.attempt = r.attempt) THEN 0 ELSE 1 END"""

RELEASE_BY_TOKEN = f"""UPDATE job_run AS r
   SET claimed_by = NULL, claim_expires_at = NULL, attempt = {ATTEMPT_GIVEN_BACK}
 WHERE r.status IN ('pending', 'retrying')
   AND r.claimed_by = $1"""


async def release_by_token(conn: Connection, token: str) -> int:
    """Give back whatever a claim of unknown outcome leased, attempts included; how many runs that were."""
    status = await conn.execute(RELEASE_BY_TOKEN, token)
    return int(status.rsplit(" ", 1)[-1])


_ORIGINS = {origin.value: origin for origin in Origin}


def _claimed(rows: Sequence[Row], grant: Grant) -> list[ClaimedRun]:
    """RETURNING order is not claim order: sorted here by (fire_after, id). The columns are those of `_LEASE`."""
    answered_at = boottime()
    runs = []
    for row in rows:
        (id_, tenant, scheduled_for, fire_after, attempt, schedule, origin, delivery, max_attempts) = row[:9]
        (version, status, is_exhausted, is_expired, is_cancel_requested, granted_at) = row[9:]
        lease = Lease(RunRef(id_, tenant, scheduled_for, fire_after), grant.token, attempt)
        runs.append(
            ClaimedRun(
                lease,
                schedule,
                version,
                status,
                _ORIGINS[origin],
                delivery,
                max_attempts,
                granted_at,
                grant.asked_at,
                answered_at,
                is_exhausted,
                is_expired,
                is_cancel_requested,
            )
        )
    runs.sort(key=lambda run: (run.lease.ref.fire_after, run.lease.ref.id))
    return runs
