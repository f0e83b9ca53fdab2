from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from ipaddress import ip_network

import pytest

from app.boottime import boottime
from app.claim import keeper as keeping
from app.domain.address import AddressPolicy
from app.domain.outcome import Outcome
from app.domain.retry import RetryPolicy
from app.domain.run import ClaimedRun, RunRef
from app.domain.target import Target
from app.executor import attempt as attempting
from app.executor.attempt import Desk, attempt_run, database_time
from app.executor.deliver import open_session
from app.local.receiver import Receiver
from app.store.orders import Order
from app.store.pool import Connection, Pool
from tests.eventually import eventually
from tests.executor.desks import (
    BUSY,
    DONE,
    Call,
    Script,
    ScriptedDeliverer,
    answered,
    hangs_after_sending,
    hangs_before_sending,
    open_desk,
)
from tests.factories_runs import (
    SECOND,
    TARGET,
    TTL,
    attempt_rows,
    claim_one,
    everything,
    expire,
    request_cancel,
    run_row,
    seed_run,
    set_run,
)


def _order(run: ClaimedRun, *, target: Target | None = TARGET, retry: RetryPolicy | None = None) -> Order:
    return Order(run.schedule_id, 3, "a schedule", target, retry or RetryPolicy(), skips_overlap=False)


@asynccontextmanager
async def _under_way(
    dsn: str, db: Connection, pool: Pool, script: Script, **seed: object
) -> AsyncIterator[tuple[asyncio.Task[None], ClaimedRun, Desk]]:
    """An attempt that has begun its delivery, and hangs in it."""
    ref = await seed_run(db, None, **seed)
    run = await claim_one(db)
    assert run.lease.ref == ref
    async with open_desk(dsn, pool, script) as (desk, deliverer):
        task = asyncio.create_task(attempt_run(run, _order(run), desk))
        await eventually(lambda: bool(deliverer.calls))
        yield task, run, desk
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _carry(
    dsn: str,
    db: Connection,
    pool: Pool,
    script: Script = answered,
    *,
    retry: RetryPolicy | None = None,
    **seed: object,
) -> tuple[RunRef, ScriptedDeliverer]:
    """Claim one run and carry it to its settlement."""
    ref = await seed_run(db, None, **seed)
    run = await claim_one(db)
    async with open_desk(dsn, pool, script) as (desk, deliverer):
        await asyncio.wait_for(attempt_run(run, _order(run, retry=retry), desk), timeout=60)
    return ref, deliverer


def _says(outcome: Outcome) -> Script:
    async def script(call: Call) -> Outcome:
        call.send()
        return outcome

    return script


async def test_a_delivered_run_succeeds_with_the_evidence_of_its_attempt(
    dsn: str, db: Connection, pool: Pool
) -> None:
    began: datetime = await db.fetchval("SELECT now()")
    ref, deliverer = await _carry(dsn, db, pool)
    row = await run_row(db, ref)
    assert (row["status"], row["attempt"]) == ("succeeded", 1)
    [stored] = await attempt_rows(db, ref)
    assert (stored["outcome"], stored["worker"], stored["schedule_version"]) == ("delivered", "one", 3)
    assert (stored["connect_us"], stored["first_byte_us"], stored["total_us"]) == (1000, 2000, 3000)
    request = json.loads(str(stored["request"]))
    assert request["headers"]["carillon-attempt"] == "1"
    # By the database's clock, whatever this machine's says.
    ended: datetime = await db.fetchval("SELECT now()")
    assert began <= stored["started_at"] <= stored["finished_at"] <= ended  # type: ignore[operator]
    [call] = deliverer.calls
    assert call.deadline == TTL / 2
    assert call.headers["carillon-run-id"] == str(ref.id)


async def test_what_identifies_a_delivery_is_the_same_on_every_attempt_but_for_its_number(
    dsn: str, db: Connection, pool: Pool
) -> None:
    ref = await seed_run(db)
    async with open_desk(dsn, pool, _says(BUSY)) as (desk, deliverer):
        for _ in range(2):
            run = await claim_one(db)
            await attempt_run(run, _order(run), desk)
            await set_run(db, ref, fire_after=ref.fire_after)
    first, second = (dict(call.headers) for call in deliverer.calls)
    assert (first.pop("carillon-attempt"), second.pop("carillon-attempt")) == ("1", "2")
    assert first.pop("traceparent").split("-")[1] == second.pop("traceparent").split("-")[1] == ref.id.hex
    assert first == second
    assert first["webhook-id"] == str(ref.id)
    assert datetime.fromisoformat(first["carillon-scheduled-for"]) == ref.scheduled_for


async def test_a_rejected_run_is_tried_again_within_its_policy(dsn: str, db: Connection, pool: Pool) -> None:
    policy = RetryPolicy(5, base=timedelta(minutes=10), factor=1.0, cap=timedelta(minutes=10))
    now: datetime = await db.fetchval("SELECT now()")
    ref, _ = await _carry(dsn, db, pool, _says(BUSY), retry=policy)
    row = await run_row(db, ref)
    assert (row["status"], row["attempt"]) == ("retrying", 1)
    fire_after = row["fire_after"]
    assert isinstance(fire_after, datetime)
    assert now + SECOND <= fire_after <= await db.fetchval("SELECT now()") + timedelta(minutes=10)
    assert [row["outcome"] for row in await attempt_rows(db, ref)] == ["rejected"]


async def test_the_last_attempt_of_a_run_fails_it(dsn: str, db: Connection, pool: Pool) -> None:
    ref, _ = await _carry(dsn, db, pool, _says(BUSY), attempt=2, max_attempts=3)
    row = await run_row(db, ref)
    assert (row["status"], row["reason"], row["attempt"]) == ("failed", "attempts_spent", 3)
    assert [row["outcome"] for row in await attempt_rows(db, ref)] == ["rejected"]


async def test_the_runs_own_ceiling_counts_and_not_that_of_an_edited_policy(
    dsn: str, db: Connection, pool: Pool
) -> None:
    ref, _ = await _carry(dsn, db, pool, _says(BUSY), attempt=1, max_attempts=8, retry=RetryPolicy(2))
    assert (await run_row(db, ref))["status"] == "retrying"


@pytest.mark.parametrize(
    ("refusal", "end"),
    [
        ({"is_cancel_requested": True}, ("cancelled", "cancelled")),
        ({"is_exhausted": True}, ("failed", "attempts_spent")),
        ({"is_expired": True}, ("failed", "expired")),
        ({"schedule_status": "paused"}, ("cancelled", "schedule_paused")),
        ({"schedule_status": None}, ("cancelled", "schedule_deleted")),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else next(iter(value)),
)
async def test_a_run_that_may_not_be_sent_ends_without_a_request(
    dsn: str, db: Connection, pool: Pool, refusal: dict[str, object], end: tuple[str, str]
) -> None:
    ref = await seed_run(db)
    run = replace(await claim_one(db), **refusal)  # type: ignore[arg-type]
    async with open_desk(dsn, pool) as (desk, deliverer):
        await attempt_run(run, _order(run), desk)
    row = await run_row(db, ref)
    assert (row["status"], row["reason"]) == end
    assert deliverer.calls == []
    assert await attempt_rows(db, ref) == []


@pytest.mark.parametrize(
    ("target", "end"),
    [("no order", ("cancelled", "schedule_deleted")), ("no target", ("failed", "target_unusable"))],
)
async def test_a_run_without_an_order_or_a_usable_target_ends_without_a_request(
    dsn: str, db: Connection, pool: Pool, target: str, end: tuple[str, str]
) -> None:
    ref = await seed_run(db)
    run = await claim_one(db)
    order = None if target == "no order" else _order(run, target=None)
    async with open_desk(dsn, pool) as (desk, deliverer):
        await attempt_run(run, order, desk)
    row = await run_row(db, ref)
    assert (row["status"], row["reason"]) == end
    assert deliverer.calls == []


async def test_nothing_is_sent_after_the_local_deadline_and_the_run_is_given_back(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection took so long that the lease may be another's by now; the row says that it is still ours."""
    passed = 0.0
    monkeypatch.setattr(keeping, "boottime", lambda: boottime() + passed)

    async def slow_to_connect(call: Call) -> Outcome:
        nonlocal passed
        passed = TTL.total_seconds()
        call.send()
        return DONE

    ref, deliverer = await _carry(dsn, db, pool, slow_to_connect)
    assert deliverer.sent == 0
    row = await run_row(db, ref)
    assert (row["status"], row["attempt"], row["claimed_by"]) == ("pending", 0, None)
    assert await attempt_rows(db, ref) == []


async def test_a_real_request_stays_unsent_after_the_local_deadline(
    dsn: str, db: Connection, pool: Pool, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AddressPolicy(allowed_networks=(ip_network("127.0.0.0/8"),))
    deliverer = open_session(policy, connections=4)
    passed = TTL.total_seconds()
    monkeypatch.setattr(keeping, "boottime", lambda: boottime() + passed)
    ref = await seed_run(db)
    target = Target("GET", f"{receiver.url}/", (), None)
    try:
        async with open_desk(dsn, pool) as (scripted, _):
            desk = replace(scripted, deliverer=deliverer)
            run = await claim_one(db)
            await attempt_run(run, _order(run, target=target), desk)
            assert receiver.received == []
            assert (await run_row(db, ref))["attempt"] == 0
            passed = 0.0
            run = await claim_one(db)
            await attempt_run(run, _order(run, target=target), desk)
            assert len(receiver.received) == 1
    finally:
        await deliverer.close()
    assert (await run_row(db, ref))["status"] == "succeeded"


@pytest.mark.parametrize("script", [hangs_before_sending, hangs_after_sending])
async def test_a_lease_taken_over_during_the_delivery_ends_it_and_the_loser_writes_nothing(
    dsn: str, db: Connection, pool: Pool, script: Script
) -> None:
    async with _under_way(dsn, db, pool, script) as (task, run, desk):
        await expire(db, run.lease.ref)
        await claim_one(db, "two")
        before = await everything(db)
        await desk.keeper.extend_all()
        await asyncio.wait_for(task, timeout=60)
        assert await everything(db) == before


async def test_an_answer_that_came_after_the_lease_was_lost_is_offered_and_refused(
    dsn: str, db: Connection, pool: Pool
) -> None:
    answer = asyncio.Event()

    async def answers_late(call: Call) -> Outcome:
        call.send()
        await answer.wait()
        return DONE

    async with _under_way(dsn, db, pool, answers_late) as (task, run, _):
        await expire(db, run.lease.ref)
        await claim_one(db, "two")
        before = await everything(db)
        answer.set()
        await asyncio.wait_for(task, timeout=60)
        assert await everything(db) == before


async def _past_the_local_deadline(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    monkeypatch.setattr(keeping, "boottime", lambda: boottime() + TTL.total_seconds())
    desk.keeper._interrupt_overdue()


async def test_a_request_cut_off_by_the_local_deadline_before_it_left_gives_its_run_back(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _under_way(dsn, db, pool, hangs_before_sending) as (task, run, desk):
        await _past_the_local_deadline(monkeypatch, desk)
        await asyncio.wait_for(task, timeout=60)
        row = await run_row(db, run.lease.ref)
        assert (row["attempt"], row["claimed_by"]) == (0, None)


async def test_a_request_cut_off_by_the_local_deadline_after_it_left_is_left_to_whoever_takes_the_run(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _under_way(dsn, db, pool, hangs_after_sending) as (task, run, desk):
        before = await everything(db)
        await _past_the_local_deadline(monkeypatch, desk)
        await asyncio.wait_for(task, timeout=60)
        assert await everything(db) == before
        await expire(db, run.lease.ref)
        assert (await claim_one(db, "two")).lease.attempt == 2
        [lost] = await attempt_rows(db, run.lease.ref)
        assert (lost["outcome"], lost["maybe_delivered"]) == ("lease_lost", True)


async def test_a_cancel_request_interrupts_the_delivery_and_ends_the_run_with_its_evidence(
    dsn: str, db: Connection, pool: Pool
) -> None:
    async with _under_way(dsn, db, pool, hangs_after_sending) as (task, run, desk):
        await request_cancel(db, run.lease.ref)
        await desk.keeper.extend_all()
        await asyncio.wait_for(task, timeout=60)
        row = await run_row(db, run.lease.ref)
        assert (row["status"], row["reason"], row["attempt"]) == ("cancelled", "cancelled", 1)
        [stored] = await attempt_rows(db, run.lease.ref)
        assert (stored["outcome"], stored["maybe_delivered"]) == ("abandoned", True)
        assert json.loads(str(stored["request"]))["url"] == TARGET.url


async def test_a_cancel_request_before_the_request_left_ends_the_run_without_evidence(
    dsn: str, db: Connection, pool: Pool
) -> None:
    async with _under_way(dsn, db, pool, hangs_before_sending) as (task, run, desk):
        await request_cancel(db, run.lease.ref)
        await desk.keeper.extend_all()
        await asyncio.wait_for(task, timeout=60)
        assert (await run_row(db, run.lease.ref))["status"] == "cancelled"
        assert await attempt_rows(db, run.lease.ref) == []


async def test_a_drain_past_its_grace_gives_back_what_never_left(
    dsn: str, db: Connection, pool: Pool
) -> None:
    async with _under_way(dsn, db, pool, hangs_before_sending) as (task, run, desk):
        desk.keeper.abandon_all()
        await asyncio.wait_for(task, timeout=60)
        row = await run_row(db, run.lease.ref)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("pending", 0, None)
        assert (await claim_one(db, "two")).lease.attempt == 1


async def test_a_drain_past_its_grace_spends_the_attempt_of_what_may_have_left(
    dsn: str, db: Connection, pool: Pool
) -> None:
    async with _under_way(dsn, db, pool, hangs_after_sending) as (task, run, desk):
        desk.keeper.abandon_all()
        await asyncio.wait_for(task, timeout=60)
        row = await run_row(db, run.lease.ref)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("retrying", 1, None)
        [stored] = await attempt_rows(db, run.lease.ref)
        assert (stored["outcome"], stored["maybe_delivered"]) == ("abandoned", True)


async def test_a_drain_past_its_grace_fails_a_run_whose_last_attempt_may_have_left(
    dsn: str, db: Connection, pool: Pool
) -> None:
    async with _under_way(dsn, db, pool, hangs_after_sending, attempt=4, max_attempts=5) as (task, run, desk):
        desk.keeper.abandon_all()
        await asyncio.wait_for(task, timeout=60)
        row = await run_row(db, run.lease.ref)
        assert (row["status"], row["reason"], row["attempt"]) == ("failed", "attempts_spent", 5)


async def test_a_cancellation_from_outside_is_not_taken_for_an_interrupt(
    dsn: str, db: Connection, pool: Pool
) -> None:
    async with _under_way(dsn, db, pool, hangs_after_sending) as (task, _, desk):
        before = await everything(db)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await everything(db) == before
        assert desk.keeper.held == 0


async def test_the_database_time_goes_on_from_the_claims_answer_on_the_local_clock(
    db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seed_run(db)
    run = await claim_one(db)
    monkeypatch.setattr(attempting, "boottime", lambda: run.answered_at + 7)
    assert database_time(run) == run.granted_at + timedelta(seconds=7)
