"""Keeping and giving back leases: extend, release, defer, reap.

Every write names its lease: `claimed_by` stands in the WHERE of each statement, so a verb replayed by a replica that
has lost the run changes nothing. Arrays are sorted by (scheduled_for, id) in every verb, the lock order of the house
(unsorted: 91 deadlocks in seconds, sorted: none).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from app.domain.ids import RunId, TenantId
from app.domain.run import Defer, Lease, RunRef, Settled
from app.store.claims import ATTEMPT_GIVEN_BACK, Cursor
from app.store.pool import Connection

Key = tuple[datetime, UUID, str]
"""(scheduled_for, id, token): one lease, in lock order. Without the token, a replica's two leases on one run (lost and
claimed again) would be taken for each other."""


def key_of(lease: Lease) -> Key:
    return (lease.ref.scheduled_for, lease.ref.id, lease.token)


def in_lock_order(leases: Iterable[Lease]) -> list[Lease]:
    return sorted(leases, key=key_of)


# Never waits: a row that somebody holds (a settlement, an edit) is skipped here and looked at again below.
EXTEND = """WITH given AS (
    SELECT * FROM unnest($1::uuid[], $2::timestamptz[], $3::text[]) AS g(id, scheduled_for, token)
), mine AS MATERIALIZED (
    SELECT r.id, r.scheduled_for
      FROM given AS g
      JOIN job_run AS r ON r.id = g.id AND r.scheduled_for = g.scheduled_for
     WHERE r.claimed_by = g.token
       FOR NO KEY UPDATE OF r SKIP LOCKED
)
UPDATE job_run AS r
   SET claim_expires_at = clock_timestamp() + $4::interval
  FROM mine
 WHERE r.id = mine.id
   AND r.scheduled_for = mine.scheduled_for
RETURNING r.scheduled_for, r.id, r.claimed_by, r.cancel_requested_at IS NOT NULL"""

STILL_OURS = """SELECT r.scheduled_for, r.id, r.claimed_by, r.cancel_requested_at IS NOT NULL
  FROM unnest($1::uuid[], $2::timestamptz[], $3::text[]) AS g(id, scheduled_for, token)
  JOIN job_run AS r ON r.id = g.id AND r.scheduled_for = g.scheduled_for
 WHERE r.claimed_by = g.token"""


@dataclass(frozen=True, slots=True)
class Extended:
    """What became of each lease that was to be extended; every one is in exactly one of the first three."""

    kept: frozenset[Lease]
    busy: frozenset[Lease]
    lost: frozenset[Lease]
    cancel_requested: frozenset[Lease]


async def extend(conn: Connection, leases: Sequence[Lease], *, ttl: timedelta) -> Extended:
    """Move the leases that are still ours to now + ttl, without ever waiting for a row.

    `busy` are ours but held by somebody at this moment (their end has not moved: ask again); `lost` belong to
    another claim or have ended. `cancel_requested` are among kept and busy.
    """
    asked = in_lock_order(leases)
    by_key = {key_of(lease): lease for lease in asked}
    moved = await conn.fetch(EXTEND, *_columns(asked), ttl)
    kept = {by_key[row[0], row[1], row[2]] for row in moved}
    cancelled = {by_key[row[0], row[1], row[2]] for row in moved if row[3]}
    rest = [lease for lease in asked if lease not in kept]
    busy: set[Lease] = set()
    if rest:
        held = await conn.fetch(STILL_OURS, *_columns(rest))
        busy = {by_key[row[0], row[1], row[2]] for row in held}
        cancelled |= {by_key[row[0], row[1], row[2]] for row in held if row[3]}
    return Extended(
        kept=frozenset(kept),
        busy=frozenset(busy),
        lost=frozenset(set(rest) - busy),
        cancel_requested=frozenset(cancelled),
    )


RELEASE = f"""UPDATE job_run AS r
   SET claimed_by = NULL, claim_expires_at = NULL, attempt = {ATTEMPT_GIVEN_BACK}
  FROM unnest($1::uuid[], $2::timestamptz[], $3::text[]) AS g(id, scheduled_for, token)
 WHERE r.id = g.id
   AND r.scheduled_for = g.scheduled_for
   AND r.claimed_by = g.token
RETURNING r.scheduled_for, r.id, g.token"""


async def release(conn: Connection, leases: Sequence[Lease]) -> set[Key]:
    """Give back runs whose request never left: due again at once, the attempt not spent. Returns those given back."""
    rows = await conn.fetch(RELEASE, *_columns(in_lock_order(leases)))
    return {(row[0], row[1], row[2]) for row in rows}


# As in a retry, a cancel asked for meanwhile does not wait for the delay.
DEFER = f"""UPDATE job_run AS r
   SET claimed_by = NULL, claim_expires_at = NULL, attempt = {ATTEMPT_GIVEN_BACK},
       fire_after = now() + CASE WHEN r.cancel_requested_at IS NULL THEN g.delay ELSE '0' END, reason = g.reason
  FROM unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::interval[], $5::text[])
       AS g(id, scheduled_for, token, delay, reason)
 WHERE r.id = g.id
   AND r.scheduled_for = g.scheduled_for
   AND r.claimed_by = g.token
RETURNING r.scheduled_for, r.id, g.token"""


async def defer(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    """Put runs off without an attempt: due again after their delay. Returns those put off."""
    ordered = sorted(items, key=lambda item: key_of(item.lease))
    deferred = [item.settlement for item in ordered if isinstance(item.settlement, Defer)]
    rows = await conn.fetch(
        DEFER,
        *_columns([item.lease for item in ordered]),
        [settlement.delay for settlement in deferred],
        [settlement.reason.value for settlement in deferred],
    )
    return {(row[0], row[1], row[2]) for row in rows}


# A bounded slice of the claim index from a remembered place: there is no index on claim_expires_at, since one would
# break HOT and cost every claim 2.5 times. The lock lets one replica at a time do it.
REAP = """WITH turn AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(7310579611) AS is_ours
), slice AS MATERIALIZED (
    SELECT id, scheduled_for, fire_after, claim_expires_at
      FROM job_run
     WHERE status IN ('pending', 'retrying')
       AND (fire_after, id) > ($1::timestamptz, $2::uuid)
       AND (SELECT is_ours FROM turn)
     ORDER BY fire_after, id
     LIMIT $3
), expired AS MATERIALIZED (
    SELECT r.id, r.scheduled_for, r.tenant_id, r.schedule_version, r.attempt, r.claimed_by
      FROM slice
      JOIN job_run AS r ON r.id = slice.id AND r.scheduled_for = slice.scheduled_for
     WHERE slice.claim_expires_at < now()
       AND r.claim_expires_at < now()
     ORDER BY r.scheduled_for, r.id
       FOR UPDATE OF r SKIP LOCKED
), lost AS (
    INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, schedule_version, outcome, maybe_delivered,
                             error, finished_at, worker, lease_token)
    SELECT id, scheduled_for, attempt, tenant_id, schedule_version, 'lease_lost', true,
           'the lease ended before the attempt was settled', clock_timestamp(), split_part(claimed_by, '/', 1),
           claimed_by
      FROM expired
        ON CONFLICT (run_id, scheduled_for, attempt) DO NOTHING
), reaped AS (
    UPDATE job_run AS r
       SET claimed_by = NULL,
           claim_expires_at = NULL,
           status = CASE WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
                         WHEN r.attempt >= r.max_attempts THEN 'failed'
                         ELSE 'retrying' END,
           reason = CASE WHEN r.cancel_requested_at IS NOT NULL THEN 'cancelled'
                         WHEN r.attempt >= r.max_attempts THEN 'attempts_spent'
                         ELSE r.reason END,
           finished_at = CASE WHEN r.cancel_requested_at IS NOT NULL OR r.attempt >= r.max_attempts
                              THEN clock_timestamp() END
      FROM expired
     WHERE r.id = expired.id
       AND r.scheduled_for = expired.scheduled_for
    RETURNING r.id, r.tenant_id, r.scheduled_for, r.fire_after, r.status
), shortened AS (
    UPDATE job_run AS r
       SET claim_expires_at = now() + $4::interval
      FROM (SELECT c.id, c.scheduled_for
              FROM slice
              JOIN job_run AS c ON c.id = slice.id AND c.scheduled_for = slice.scheduled_for
             WHERE slice.claim_expires_at > now() + 2 * $4::interval
               AND c.claim_expires_at > now() + 2 * $4::interval
             ORDER BY c.scheduled_for, c.id
               FOR NO KEY UPDATE OF c SKIP LOCKED) AS immortal
     WHERE r.id = immortal.id
       AND r.scheduled_for = immortal.scheduled_for
)
SELECT (SELECT count(*) FROM slice) AS looked_at,
       (SELECT fire_after FROM slice ORDER BY fire_after DESC, id DESC LIMIT 1) AS last_fire_after,
       (SELECT id FROM slice ORDER BY fire_after DESC, id DESC LIMIT 1) AS last_id,
       r.id, r.tenant_id, r.scheduled_for, r.fire_after, r.status
  FROM (SELECT 1) AS one
  LEFT JOIN reaped AS r ON true"""


@dataclass(frozen=True, slots=True)
class Reaped:
    """One pass of the reaper: the runs that are free again, how many ended, and where to go on (None: start over)."""

    freed: list[RunRef]
    ended: int
    go_on_behind: Cursor | None


async def reap(conn: Connection, *, behind: Cursor, limit: int, longest: timedelta) -> Reaped:
    """Recover expired leases in the next `limit` entries of the claim index; a backstop for idle or full fleets.

    Runs with attempts left are due again, the others end `failed` (or `cancelled` where that was asked for), each
    with a `lease_lost` attempt. A lease that ends later than any grant allows (twice `longest`; a clock that was
    ahead) is cut to `longest`.
    """
    rows = await conn.fetch(REAP, behind.fire_after, behind.id, limit, longest)
    head = rows[0]
    open_again = [row for row in rows if row["id"] is not None and row["status"] == "retrying"]
    ended = sum(1 for row in rows if row["id"] is not None) - len(open_again)
    is_full = head["looked_at"] == limit
    return Reaped(
        freed=[
            RunRef(RunId(row["id"]), TenantId(row["tenant_id"]), row["scheduled_for"], row["fire_after"])
            for row in open_again
        ],
        ended=ended,
        go_on_behind=Cursor(head["last_fire_after"], head["last_id"]) if is_full else None,
    )


def _columns(leases: Sequence[Lease]) -> tuple[list[UUID], list[datetime], list[str]]:
    return (
        [lease.ref.id for lease in leases],
        [lease.ref.scheduled_for for lease in leases],
        [lease.token for lease in leases],
    )
