"""Writing what an outcome means: complete, retry, fail, cancel, and the minimal `mark_failed`.

Each verb is one statement for many runs: the run rows and the evidence of exactly the rows that were updated, so that
a lease lost on the way loses its evidence too (the claim that took it wrote `lease_lost`). All verbs return the leases
they wrote, by their keys; one that is missing was not ours any more.

No statement here asks for the status: only open runs have an owner (a CHECK of the table), and the question would let
the partial indexes of open runs be used, which a session that planned while the month was empty then reads from end to
end for every run. All of them run under PLAN_GUARDS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import orjson

from app.domain.outcome import (
    Abandoned,
    Answer,
    Blocked,
    Delivered,
    Outcome,
    Rejected,
    TimedOut,
    Timing,
    Unreachable,
    is_maybe_delivered,
    name_of,
)
from app.domain.run import Cancel, Evidence, Fail, Reason, Retry, Settled
from app.errors import RowRefused
from app.store.claims import ATTEMPT_GIVEN_BACK
from app.store.leases import Key, key_of
from app.store.pool import Connection

_GIVEN = """WITH given AS (
    SELECT *
      FROM unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::text[], $5::int[], $6::timestamptz[],
                  $7::timestamptz[], $8::int[], $9::int[], $10::int[], $11::jsonb[], $12::jsonb[], $13::text[],
                  $14::text[], $15::int[], $16::boolean[], $17::text[], $18::text[], $19::interval[])
        AS g(id, scheduled_for, token, outcome, status_code, started_at, finished_at, connect_us, first_byte_us,
             total_us, request, response_headers, response_excerpt, worker, schedule_version, maybe_delivered, error,
             reason, delay)
), written AS (
    UPDATE job_run AS r
       SET claimed_by = NULL,
           claim_expires_at = NULL,
           """

_EVIDENCE = """
      FROM given AS g
     WHERE r.id = g.id
       AND r.scheduled_for = g.scheduled_for
       AND r.claimed_by = g.token
    RETURNING r.tenant_id, r.attempt, g.*
), evidence AS (
    INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, schedule_version, outcome, maybe_delivered,
                             error, status_code, started_at, finished_at, connect_us, first_byte_us, total_us,
                             request, response_headers, response_excerpt, worker, lease_token)
    SELECT id, scheduled_for, attempt, tenant_id, schedule_version, outcome, maybe_delivered, error, status_code,
           started_at, finished_at, connect_us, first_byte_us, total_us, request, response_headers, response_excerpt,
           worker, token
      FROM written
     WHERE outcome IS NOT NULL
        ON CONFLICT (run_id, scheduled_for, attempt) DO NOTHING
)
SELECT scheduled_for, id, token FROM written"""


# What nearly all runs end with, so it carries only what an answered attempt has (`_answered` makes its columns), and
# names what it wrote only when that is not all.
COMPLETE = """WITH given AS (
    SELECT *
      FROM unnest($1::uuid[], $2::timestamptz[], $3::text[], $4::text[], $5::int[], $6::timestamptz[],
                  $7::timestamptz[], $8::int[], $9::int[], $10::int[], $11::jsonb[], $12::jsonb[], $13::text[],
                  $14::text[], $15::int[])
        AS g(id, scheduled_for, token, outcome, status_code, started_at, finished_at, connect_us, first_byte_us,
             total_us, request, response_headers, response_excerpt, worker, schedule_version)
), written AS (
    UPDATE job_run AS r
       SET claimed_by = NULL, claim_expires_at = NULL, status = 'succeeded', reason = NULL,
           finished_at = clock_timestamp()
      FROM given AS g
     WHERE r.id = g.id
       AND r.scheduled_for = g.scheduled_for
       AND r.claimed_by = g.token
    RETURNING r.tenant_id, r.attempt, g.*
), evidence AS (
    INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, schedule_version, outcome, maybe_delivered,
                             status_code, started_at, finished_at, connect_us, first_byte_us, total_us, request,
                             response_headers, response_excerpt, worker, lease_token)
    SELECT id, scheduled_for, attempt, tenant_id, schedule_version, outcome, true, status_code, started_at,
           finished_at, connect_us, first_byte_us, total_us, request, response_headers, response_excerpt, worker, token
      FROM written
        ON CONFLICT (run_id, scheduled_for, attempt) DO NOTHING
)
SELECT told.amount, w.scheduled_for, w.id, w.token
  FROM (SELECT count(*) AS amount FROM written) AS told
  LEFT JOIN written AS w ON told.amount < $16"""


async def complete(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    """The runs have succeeded, each by an answer that was judged good."""
    ordered = sorted(items, key=lambda item: key_of(item.lease))
    rows = await conn.fetch(COMPLETE, *_columns(map(_answered, ordered)), len(ordered))
    if rows[0][0] == len(ordered):
        return {key_of(item.lease) for item in ordered}
    return {(row[1], row[2], row[3]) for row in rows if row[2] is not None}


# A cancel asked for meanwhile must not wait for the backoff: due at once, the next claim settles it as cancelled.
RETRY = f"""{_GIVEN}status = 'retrying', reason = NULL,
           fire_after = now() + CASE WHEN r.cancel_requested_at IS NULL THEN g.delay ELSE '0' END{_EVIDENCE}"""


async def retry(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    """The runs get another attempt after their delay."""
    return await _write(conn, RETRY, items)


# A run that ends unsent gives back the attempt that its claim spent: `attempt` counts what has begun. A fault of ours
# keeps it, since nobody knows how far it came.
_ENDS = f"""reason = g.reason, finished_at = clock_timestamp(),
           attempt = CASE WHEN g.outcome IS NULL AND g.reason <> 'internal_error' THEN {ATTEMPT_GIVEN_BACK}
                          ELSE r.attempt END"""

FAIL = f"{_GIVEN}status = 'failed', {_ENDS}{_EVIDENCE}"


async def fail(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    """The runs have failed for good, each with its reason."""
    return await _write(conn, FAIL, items)


CANCEL = f"{_GIVEN}status = 'cancelled', {_ENDS}{_EVIDENCE}"


async def cancel(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    """The runs end cancelled, each with its reason; evidence only where a request may have left."""
    return await _write(conn, CANCEL, items)


MARK_FAILED = """UPDATE job_run AS r
   SET status = 'failed', reason = $4, finished_at = clock_timestamp(), claimed_by = NULL, claim_expires_at = NULL
 WHERE r.id = $1
   AND r.scheduled_for = $2
   AND r.claimed_by = $3
RETURNING r.id"""


async def mark_failed(conn: Connection, item: Settled, *, reason: Reason) -> bool:
    """Last resort after a refused settlement: the run row alone, nothing else that could be refused."""
    ref = item.lease.ref
    written = await conn.fetchval(MARK_FAILED, ref.id, ref.scheduled_for, item.lease.token, reason.value)
    return written is not None


WITH_OUR_EVIDENCE = """SELECT a.scheduled_for, a.run_id, a.lease_token
  FROM unnest($1::uuid[], $2::timestamptz[], $3::smallint[], $4::text[]) AS g(id, scheduled_for, attempt, token)
  JOIN run_attempt AS a
    ON a.run_id = g.id AND a.scheduled_for = g.scheduled_for AND a.attempt = g.attempt
 WHERE a.lease_token = g.token
   AND a.outcome <> 'lease_lost'"""


async def written_before(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    """After a COMMIT of unknown outcome: the settlements that had in fact been written, known by their evidence."""
    ordered = sorted(items, key=lambda item: key_of(item.lease))
    rows = await conn.fetch(
        WITH_OUR_EVIDENCE,
        [item.lease.ref.id for item in ordered],
        [item.lease.ref.scheduled_for for item in ordered],
        [item.lease.attempt for item in ordered],
        [item.lease.token for item in ordered],
    )
    return {(row[0], row[1], row[2]) for row in rows}


async def _write(conn: Connection, statement: str, items: Sequence[Settled]) -> set[Key]:
    ordered = sorted(items, key=lambda item: key_of(item.lease))
    rows = await conn.fetch(statement, *_columns(map(_any_end, ordered)))
    return {(row[0], row[1], row[2]) for row in rows}


def _columns(table: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list(zip(*table, strict=True))


def _answered(item: Settled) -> tuple[Any, ...]:
    """One row of what COMPLETE is given, in its column order."""
    assert item.evidence is not None
    ref = item.lease.ref
    return (ref.id, ref.scheduled_for, item.lease.token, *_attempt(item.evidence))


def _any_end(item: Settled) -> tuple[Any, ...]:
    """One row of what all others are given, in the column order of `_GIVEN`."""
    reason: str | None = None
    delay: timedelta | None = None
    match item.settlement:
        case Fail() | Cancel():
            reason = item.settlement.reason.value
        case Retry():
            delay = item.settlement.delay
        case _:
            pass
    ref = item.lease.ref
    is_maybe = error = None
    attempt = _NO_ATTEMPT
    if item.evidence is not None:
        is_maybe = is_maybe_delivered(item.evidence.outcome)
        error = _parts(item.evidence.outcome)[2]
        attempt = _attempt(item.evidence)
    return (ref.id, ref.scheduled_for, item.lease.token, *attempt, is_maybe, error, reason, delay)


_NO_ATTEMPT: tuple[Any, ...] = (None,) * 12


def _attempt(evidence: Evidence) -> tuple[Any, ...]:
    answer, timing, _ = _parts(evidence.outcome)
    sent = evidence.sent
    return (
        name_of(evidence.outcome),
        None if answer is None else answer.status,
        evidence.started_at,
        evidence.finished_at,
        _micros(timing.connect),
        _micros(timing.first_byte),
        _micros(timing.total),
        None
        if sent is None
        else _json(
            {
                "method": sent.method,
                "url": sent.url,
                "headers": dict(sent.headers),
                "body_bytes": sent.body_bytes,
            }
        ),
        None if answer is None else _json(dict(answer.headers)),
        None if answer is None else answer.excerpt,
        evidence.worker,
        evidence.schedule_version,
    )


def _json(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise RowRefused(f"an attempt cannot be kept as JSON: {error}") from None


def _parts(outcome: Outcome) -> tuple[Answer | None, Timing, str | None]:
    match outcome:
        case Delivered() | Rejected():
            return outcome.answer, outcome.timing, None
        case TimedOut():
            return None, outcome.timing, f"timed out: {outcome.phase}"
        case Unreachable():
            return None, outcome.timing, f"{outcome.error}: {outcome.detail}"
        case Blocked() | Abandoned():
            return None, outcome.timing, outcome.detail


def _micros(span: timedelta | None) -> int | None:
    return None if span is None else (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
