from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.outcome import (
    Abandoned,
    Answer,
    Blocked,
    Outcome,
    Rejected,
    Sent,
    TimedOut,
    Timing,
    Unreachable,
)
from app.domain.run import Cancel, Complete, Evidence, Fail, Lease, Reason, Retry, Settled, Settlement
from app.errors import RowRefused, StoreError
from app.store import leases, settlements
from app.store.leases import key_of
from app.store.pool import Connection, Pool, acquire
from tests.factories_runs import (
    DELIVERED,
    SECOND,
    attempt_rows,
    claim,
    claim_one,
    everything,
    evidence,
    expire,
    leases_of,
    request_cancel,
    run_row,
    seed_run,
    seed_runs,
    seed_schedule,
)

STARTED = datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=UTC)
MS = timedelta(milliseconds=1)


async def test_complete_ends_the_run_and_keeps_what_was_sent_and_answered(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    sent = Sent("PUT", "https://example.com/a?b=c", (("X-One", "1"), ("Authorization", "[redacted]")), 12)
    answer = Answer(204, (("retry-after", "7"), ("content-type", "a/b")), "grüße 🎵", truncated=False)
    timing = Timing(connect=3 * MS, first_byte=5 * MS, total=9 * MS)
    proof = Evidence(Rejected(answer, timing), sent, 7, STARTED, STARTED + SECOND, "worker one")
    now: datetime = await db.fetchval("SELECT now()")
    assert await settlements.complete(db, [Settled(lease, Complete(), proof)]) == {key_of(lease)}
    row = await run_row(db, ref)
    finished_at = row.pop("finished_at")
    assert isinstance(finished_at, datetime)
    assert finished_at >= now
    assert {
        name: row[name] for name in ("status", "reason", "attempt", "claimed_by", "claim_expires_at")
    } == {
        "status": "succeeded",
        "reason": None,
        "attempt": 1,
        "claimed_by": None,
        "claim_expires_at": None,
    }
    [stored] = await attempt_rows(db, ref)
    assert json.loads(str(stored.pop("request"))) == {
        "method": "PUT",
        "url": "https://example.com/a?b=c",
        "headers": {"X-One": "1", "Authorization": "[redacted]"},
        "body_bytes": 12,
    }
    assert json.loads(str(stored.pop("response_headers"))) == {"retry-after": "7", "content-type": "a/b"}
    assert stored == {
        "run_id": ref.id,
        "scheduled_for": ref.scheduled_for,
        "attempt": 1,
        "tenant_id": ref.tenant_id,
        "schedule_version": 7,
        "outcome": "rejected",
        "maybe_delivered": True,
        "error": None,
        "status_code": 204,
        "started_at": STARTED,
        "finished_at": STARTED + SECOND,
        "connect_us": 3_000,
        "first_byte_us": 5_000,
        "total_us": 9_000,
        "response_excerpt": "grüße 🎵",
        "worker": "worker one",
        "lease_token": lease.token,
    }


OUTCOMES: list[tuple[Outcome, tuple[str, bool, str | None, int | None]]] = [
    (DELIVERED, ("delivered", True, None, 200)),
    (Rejected(Answer(503, (), "", truncated=False), Timing()), ("rejected", True, None, 503)),
    (
        TimedOut("connect", is_maybe_delivered=False, timing=Timing()),
        ("timed_out", False, "timed out: connect", None),
    ),
    (
        TimedOut("answer", is_maybe_delivered=True, timing=Timing()),
        ("timed_out", True, "timed out: answer", None),
    ),
    (
        Unreachable("dns", "no such name", is_maybe_delivered=False, timing=Timing()),
        ("unreachable", False, "dns: no such name", None),
    ),
    (Blocked("not allowed"), ("blocked", False, "not allowed", None)),
    (Abandoned("stopping", is_maybe_delivered=True), ("abandoned", True, "stopping", None)),
]


@pytest.mark.parametrize(
    ("outcome", "stored"), OUTCOMES, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
async def test_every_outcome_has_its_evidence(
    db: Connection, outcome: Outcome, stored: tuple[str, bool, str | None, int | None]
) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    await settlements.fail(db, [Settled(lease, Fail(Reason.NOT_RETRYABLE), evidence(outcome))])
    [row] = await attempt_rows(db, ref)
    assert (row["outcome"], row["maybe_delivered"], row["error"], row["status_code"]) == stored


async def test_retry_makes_the_run_due_after_its_delay_with_the_attempt_spent(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    now: datetime = await db.fetchval("SELECT now()")
    delay = timedelta(minutes=7)
    await settlements.retry(db, [Settled(lease, Retry(delay), evidence())])
    row = await run_row(db, ref)
    assert (row["status"], row["attempt"], row["claimed_by"], row["finished_at"]) == (
        "retrying",
        1,
        None,
        None,
    )
    fire_after = row["fire_after"]
    assert isinstance(fire_after, datetime)
    assert now + delay <= fire_after <= await db.fetchval("SELECT now()") + delay
    assert await claim(db) == []


async def test_a_cancel_request_does_not_wait_for_the_backoff(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    await request_cancel(db, ref)
    await settlements.retry(db, [Settled(lease, Retry(timedelta(hours=9)), evidence())])
    assert (await claim_one(db)).is_cancel_requested


@pytest.mark.parametrize(
    ("write", "settlement", "end"),
    [
        (settlements.fail, Fail(Reason.EXPIRED), ("failed", "expired", 0)),
        (settlements.cancel, Cancel(Reason.OVERLAP), ("cancelled", "overlap", 0)),
        # Nobody knows how far a fault of ours came, so its attempt stays spent.
        (settlements.fail, Fail(Reason.INTERNAL_ERROR), ("failed", "internal_error", 1)),
    ],
)
async def test_a_run_that_was_never_sent_ends_with_its_reason_without_evidence_and_without_an_attempt(
    db: Connection,
    write: Callable[..., object],
    settlement: Settlement,
    end: tuple[str, str, int],
) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    assert await write(db, [Settled(lease, settlement, None)]) == {key_of(lease)}  # type: ignore[misc]
    row = await run_row(db, ref)
    assert (row["status"], row["reason"], row["attempt"]) == end
    assert row["finished_at"] is not None
    assert await attempt_rows(db, ref) == []


async def test_a_group_writes_each_run_its_own_reason_delay_and_evidence_whatever_its_order(
    db: Connection,
) -> None:
    await seed_runs(db, await seed_schedule(db), 6)
    held = leases_of(await claim(db))
    reasons = [Reason.EXPIRED, Reason.NOT_RETRYABLE, Reason.INTERNAL_ERROR]
    failing = [Settled(x, Fail(why), evidence(worker=why)) for x, why in zip(held[:3], reasons, strict=True)]
    await settlements.fail(db, failing[::-1])
    for lease, why in zip(held[:3], reasons, strict=True):
        assert (await run_row(db, lease.ref))["reason"] == why
        assert [row["worker"] for row in await attempt_rows(db, lease.ref)] == [why]
    now: datetime = await db.fetchval("SELECT now()")
    hours = [3, 1, 2]
    retrying = [
        Settled(x, Retry(timedelta(hours=h)), evidence() if h > 1 else None)
        for x, h in zip(held[3:], hours, strict=True)
    ]
    await settlements.retry(db, retrying)
    for lease, hour in zip(held[3:], hours, strict=True):
        fire_after = (await run_row(db, lease.ref))["fire_after"]
        assert isinstance(fire_after, datetime)
        assert round((fire_after - now) / timedelta(hours=1)) == hour
        assert len(await attempt_rows(db, lease.ref)) == (1 if hour > 1 else 0)


async def test_of_a_group_only_the_leases_that_are_still_ours_are_written(db: Connection) -> None:
    await seed_runs(db, await seed_schedule(db), 3, due_ago=9 * SECOND, apart=SECOND)
    ours, taken, ended = leases_of(await claim(db))
    await expire(db, taken.ref)
    await claim_one(db, "two")
    await settlements.cancel(db, [Settled(ended, Cancel(Reason.CANCELLED), None)])
    items = [Settled(lease, Complete(), evidence()) for lease in (ended, taken, ours)]
    assert await settlements.complete(db, items) == {key_of(ours)}
    assert await settlements.written_before(db, items) == {key_of(ours)}
    outcomes = {
        lease: [row["outcome"] for row in await attempt_rows(db, lease.ref)] for lease in (ours, taken, ended)
    }
    assert outcomes == {ours: ["delivered"], taken: ["lease_lost"], ended: []}


async def test_a_settlement_written_twice_is_known_by_its_own_evidence_only(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    item = Settled(lease, Retry(timedelta()), evidence())
    assert await settlements.written_before(db, [item]) == set()
    await settlements.retry(db, [item])
    before = await everything(db)
    assert await settlements.retry(db, [item]) == set()
    assert await settlements.written_before(db, [item]) == {key_of(lease)}
    assert await everything(db) == before
    # The next claim of the same process is another lease, although the run and the process are the same.
    again = (await claim_one(db)).lease
    await expire(db, ref)
    await claim_one(db, "two")
    assert [row["outcome"] for row in await attempt_rows(db, ref)] == ["delivered", "lease_lost"]
    assert await settlements.written_before(db, [Settled(again, Complete(), evidence())]) == set()


async def test_the_evidence_of_another_for_the_same_attempt_is_not_taken_for_ones_own(db: Connection) -> None:
    """Given back and claimed by another, the attempt has the same number; only the token tells whose it was."""
    await seed_run(db)
    mine = (await claim_one(db)).lease
    assert await leases.release(db, [mine])
    theirs = (await claim_one(db, "two")).lease
    assert theirs.attempt == mine.attempt
    await settlements.complete(db, [Settled(theirs, Complete(), evidence())])
    assert await settlements.written_before(db, [Settled(mine, Complete(), evidence())]) == set()


async def test_mark_failed_writes_the_run_row_alone(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    item = Settled(lease, Complete(), evidence())
    assert await settlements.mark_failed(db, item, reason=Reason.SETTLEMENT_REFUSED)
    row = await run_row(db, ref)
    assert (row["status"], row["reason"], row["claimed_by"]) == ("failed", "settlement_refused", None)
    assert await attempt_rows(db, ref) == []


def _poisoned(**how: object) -> Evidence:
    answer = Answer(
        int(str(how.get("status", 200))),
        ((("x", str(how.get("header", "y")))),),
        str(how.get("excerpt", "")),
        truncated=False,
    )
    total = how.get("total", timedelta())
    assert isinstance(total, timedelta)
    return evidence(Rejected(answer, Timing(total=total)))


@pytest.mark.parametrize(
    "poison",
    [
        {"excerpt": "a\0b"},
        {"excerpt": "\ud800"},
        {"header": "a\0b"},
        {"header": "\ud800"},
        {"status": 2**31},
        {"total": timedelta(hours=1)},
    ],
    ids=["NUL", "surrogate", "NUL in a header", "surrogate in a header", "status", "hour"],
)
async def test_what_the_database_cannot_store_is_refused_as_a_whole_and_names_no_value(
    db: Connection, pool: Pool, poison: dict[str, object]
) -> None:
    await seed_runs(db, await seed_schedule(db), 2)
    good, bad = leases_of(await claim(db))
    items = [Settled(good, Complete(), evidence()), Settled(bad, Complete(), _poisoned(**poison))]
    before = await everything(db)
    with pytest.raises(StoreError) as refusal:
        async with acquire(pool) as conn:
            await settlements.complete(conn, items)
    assert isinstance(refusal.value, RowRefused)
    assert "a\0b" not in str(refusal.value)
    assert await everything(db) == before
    assert await settlements.mark_failed(db, items[1], reason=Reason.SETTLEMENT_REFUSED)


async def test_a_settlement_touches_no_schedule(db: Connection) -> None:
    """Schedules are locked before runs by edits; a settlement that wrote one would wait the other way round."""
    schedule = await seed_schedule(db)
    await seed_runs(db, schedule, 3)
    held: list[Lease] = leases_of(await claim(db))
    before = await db.fetch("SELECT xmin::text, xmax::text, * FROM schedule")
    await settlements.complete(db, [Settled(held[0], Complete(), evidence())])
    await settlements.retry(db, [Settled(held[1], Retry(SECOND), evidence())])
    await settlements.fail(db, [Settled(held[2], Fail(Reason.EXPIRED), evidence())])
    assert await db.fetch("SELECT xmin::text, xmax::text, * FROM schedule") == before
