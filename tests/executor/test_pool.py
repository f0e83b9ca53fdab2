from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from app.claim.due import DueClaims
from app.claim.grant import Grants
from app.claim.load import TenantLoad
from app.claim.postgres import Pace, PostgresClaims
from app.domain.outcome import Outcome
from app.domain.run import ClaimedRun, Complete, RunRef, Settled
from app.domain.target import Target
from app.errors import StoreUnavailable
from app.executor.attempt import Desk
from app.executor.orders import OrderBook
from app.executor.pool import Executor
from app.store import orders, settlements
from app.store.pool import PLAN_GUARDS, Connection, Pool, close_pool, create_pool
from tests.eventually import eventually
from tests.executor.desks import (
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
    TTL,
    attempt_rows,
    evidence,
    run_row,
    seed_run,
    seed_runs,
    seed_schedule,
)
from tests.tcp_proxy import tcp_proxy

pytestmark = pytest.mark.timeout(120)

LONG = timedelta(minutes=1)
NOW = timedelta()


class Asked:
    """The real strategy, and how much was asked of it when how many slots were idle."""

    def __init__(self, inner: PostgresClaims, load: TenantLoad) -> None:
        self._inner = inner
        self._load = load
        self.limits: list[tuple[int, int]] = []

    async def open(self) -> None: ...

    async def announce(self, runs: Sequence[RunRef]) -> None: ...

    async def claim(self, limit: int) -> list[ClaimedRun]:
        self.limits.append((limit, self._load.idle))
        runs = await self._inner.claim(limit)
        assert len(runs) <= limit
        return runs

    async def leave(self) -> None:
        await self._inner.leave()

    async def close(self) -> None:
        await self._inner.close()


@dataclass(slots=True)
class Replica:
    """The executor of one replica and everything under it."""

    executor: Executor
    claims: Asked
    deliverer: ScriptedDeliverer
    desk: Desk
    load: TenantLoad
    turning: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Let the claim loop turn, as `run_loop` does."""
        self.turning = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        while not self.executor._stop.is_set():
            await self.executor.claim_and_start()

    async def idle_again(self) -> None:
        """Everything that was started has ended."""
        await eventually(lambda: self.load.in_flight == 0 and not self.executor._tasks)

    async def stop(self, *, grace: timedelta = LONG, settle_within: timedelta = LONG) -> int:
        """As a replica does at SIGTERM."""
        self.executor.stop_taking()
        await self.claims.leave()
        if self.turning is not None:
            await asyncio.wait_for(self.turning, timeout=60)
            self.turning = None
        return await self.executor.drain(grace=grace, settle_within=settle_within)


@asynccontextmanager
async def _replica(
    dsn: str,
    pool: Pool,
    script: Script = answered,
    *,
    slots: int = 20,
    cap: int = 10,
    batch: int = 10,
    pace: Pace | None = None,
) -> AsyncIterator[Replica]:
    claim_pool = await create_pool(
        dsn, size=2, application_name="carillon tests, claim", settings=PLAN_GUARDS
    )
    try:
        async with open_desk(dsn, pool, script) as (desk, deliverer):
            load = TenantLoad(slots=slots, cap=cap)
            due = DueClaims(claim_pool, Grants("one", TTL), load, rng=random.Random(3))
            claims = Asked(PostgresClaims(due, load, pace=pace), load)
            executor = Executor(claims=claims, book=OrderBook(pool), desk=desk, load=load, batch=batch)
            replica = Replica(executor, claims, deliverer, desk, load)
            yield replica
            await replica.stop(grace=NOW)
            await claims.close()
    finally:
        await close_pool(claim_pool)


async def _statuses(db: Connection) -> dict[str, int]:
    return {row[0]: row[1] for row in await db.fetch("SELECT status, count(*) FROM job_run GROUP BY 1")}


async def test_due_runs_are_delivered_and_settled_and_their_slots_come_back(
    dsn: str, db: Connection, pool: Pool
) -> None:
    for _ in range(3):
        await seed_runs(db, await seed_schedule(db), 30)
    async with _replica(dsn, pool) as replica:
        replica.start()
        await eventually(lambda: _all_succeeded(db, 90))
        await replica.idle_again()
        assert replica.load.idle == 20
    assert replica.deliverer.sent == 90
    assert await db.fetchval("SELECT count(*) FROM run_attempt WHERE outcome = 'delivered'") == 90


async def _all_succeeded(db: Connection, amount: int) -> bool:
    return await _statuses(db) == {"succeeded": amount}


async def test_no_claim_asks_for_more_than_the_idle_slots_and_the_batch(
    dsn: str, db: Connection, pool: Pool
) -> None:
    for _ in range(4):
        await seed_runs(db, await seed_schedule(db), 25)
    rng = random.Random(4)
    flying: list[asyncio.Event] = []

    async def ends_when_told(call: Call) -> Outcome:
        call.send()
        flying.append(asyncio.Event())
        await flying[-1].wait()
        return DONE

    async def end_some() -> None:
        while replica.deliverer.sent < 100 or flying:
            await asyncio.sleep(0)
            rng.shuffle(flying)
            for _ in range(rng.randint(0, len(flying))):
                flying.pop().set()

    async with _replica(dsn, pool, ends_when_told, slots=12, cap=6, batch=5) as replica:
        replica.start()
        await asyncio.wait_for(end_some(), timeout=100)
        await eventually(lambda: _all_succeeded(db, 100))
    assert all(0 < limit <= min(idle, 5) for limit, idle in replica.claims.limits)


async def test_a_full_replica_claims_nothing_until_a_settlement_is_acknowledged(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seed_runs(db, await seed_schedule(db), 5)
    async with _replica(dsn, pool, slots=2, cap=2) as replica:
        real = replica.desk.settler.settle
        acknowledged = asyncio.Event()

        async def slow(item: Settled) -> bool:
            written = await real(item)
            await acknowledged.wait()
            return written

        monkeypatch.setattr(replica.desk.settler, "settle", slow)
        replica.start()
        await eventually(lambda: _counts(db, "succeeded", 2))
        asked = len(replica.claims.limits)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (replica.load.idle, len(replica.claims.limits)) == (0, asked)
        acknowledged.set()
        await eventually(lambda: _all_succeeded(db, 5))


async def _counts(db: Connection, status: str, amount: int) -> bool:
    return (await _statuses(db)).get(status, 0) == amount


async def test_tenants_whose_targets_hang_leave_the_runs_of_the_others_flowing(
    dsn: str, db: Connection, pool: Pool
) -> None:
    """Three of them, oldest first in the queue and with more runs than all slots; each keeps to its share."""
    hanging = Target("POST", "http://hanging.example/", (), None)
    slow = [await seed_schedule(db, target=hanging) for _ in range(3)]
    for schedule in slow:
        await seed_runs(db, schedule, 40, due_ago=60 * SECOND)
    quick = [await seed_schedule(db) for _ in range(5)]
    for schedule in quick:
        await seed_runs(db, schedule, 20)

    async def by_target(call: Call) -> Outcome:
        return await (hangs_after_sending if call.target == hanging else answered)(call)

    async with _replica(dsn, pool, by_target, slots=20, cap=5) as replica:
        replica.start()
        await eventually(lambda: _counts(db, "succeeded", 100))
        assert replica.load.in_flight == 15
        assert {replica.load.room(schedule.tenant_id) for schedule in slow} == {0}
        assert await replica.stop(grace=NOW) == 0
    assert await _statuses(db) == {"succeeded": 100, "retrying": 15, "pending": 105}


async def test_a_run_is_skipped_while_an_earlier_one_of_its_schedule_has_not_ended(
    dsn: str, db: Connection, pool: Pool
) -> None:
    skipping = await seed_schedule(db, overlap="skip")
    allowing = await seed_schedule(db)
    mine = await seed_runs(db, skipping, 3, due_ago=9 * SECOND, apart=SECOND)
    theirs = await seed_runs(db, allowing, 3, due_ago=9 * SECOND, apart=SECOND)
    async with _replica(dsn, pool) as replica:
        await replica.executor.claim_and_start()
        await replica.idle_again()
    ends = [(row["status"], row["reason"]) for row in [await run_row(db, ref) for ref in mine]]
    assert ends == [("succeeded", None), ("cancelled", "overlap"), ("cancelled", "overlap")]
    assert {(await run_row(db, ref))["status"] for ref in theirs} == {"succeeded"}
    assert replica.deliverer.sent == 4
    assert [await attempt_rows(db, ref) for ref in mine[1:]] == [[], []]


async def test_a_retry_is_not_skipped_for_a_run_that_came_after_its_first_attempt(
    dsn: str, db: Connection, pool: Pool
) -> None:
    schedule = await seed_schedule(db, overlap="skip")
    first = await seed_run(db, schedule, due_ago=-60 * SECOND, attempt=1)
    second = await seed_run(db, schedule, attempt=1)
    async with _replica(dsn, pool) as replica:
        await replica.executor.claim_and_start()
        await replica.idle_again()
    assert (await run_row(db, second))["status"] == "succeeded"
    assert (await run_row(db, first))["status"] == "retrying"


async def test_a_paused_run_that_overlaps_ends_with_the_stronger_reason(
    dsn: str, db: Connection, pool: Pool
) -> None:
    schedule = await seed_schedule(db, overlap="skip", status="paused")
    first, second = await seed_runs(db, schedule, 2, due_ago=9 * SECOND, apart=SECOND)
    async with _replica(dsn, pool) as replica:
        await replica.executor.claim_and_start()
        await replica.idle_again()
    for ref in (first, second):
        assert (await run_row(db, ref))["reason"] == "schedule_paused"


async def test_a_fault_of_ours_fails_its_run_and_nothing_else(dsn: str, db: Connection, pool: Pool) -> None:
    bad = await seed_schedule(db, target=Target("POST", "http://bad.example/", (), None))
    ref = await seed_run(db, bad)
    good = await seed_run(db)

    async def faulty(call: Call) -> Outcome:
        if call.target.url == "http://bad.example/":
            raise RuntimeError("a fault of ours")
        return await answered(call)

    async with _replica(dsn, pool, faulty) as replica:
        await replica.executor.claim_and_start()
        await replica.idle_again()
        assert replica.load.idle == 20
    row = await run_row(db, ref)
    assert (row["status"], row["reason"]) == ("failed", "internal_error")
    assert (await run_row(db, good))["status"] == "succeeded"


async def test_a_target_that_cannot_be_read_fails_its_run_and_nothing_else(
    dsn: str, db: Connection, pool: Pool
) -> None:
    ref = await seed_run(db, await seed_schedule(db, target='"nonsense"'))
    good = await seed_run(db)
    async with _replica(dsn, pool) as replica:
        await replica.executor.claim_and_start()
        await replica.idle_again()
    row = await run_row(db, ref)
    assert (row["status"], row["reason"]) == ("failed", "target_unusable")
    assert (await run_row(db, good))["status"] == "succeeded"


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), RuntimeError("a fault of ours")])
async def test_runs_whose_orders_cannot_be_read_go_back_unsent_with_their_slots(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 4)

    async def fail(*args: Any) -> list[orders.Order]:
        raise fault

    monkeypatch.setattr(orders, "read_orders", fail)
    async with _replica(dsn, pool) as replica:
        await replica.executor.claim_and_start()
        await replica.idle_again()
        assert replica.load.idle == 20
    for ref in refs:
        row = await run_row(db, ref)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("pending", 0, None)
    assert replica.deliverer.calls == []


async def test_orders_are_read_once_per_version(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = orders.read_orders

    async def counted(conn: Connection, schedules: Any) -> list[orders.Order]:
        read.append(len(schedules))
        return await real(conn, schedules)

    monkeypatch.setattr(orders, "read_orders", counted)
    schedule = await seed_schedule(db)
    async with _replica(dsn, pool) as replica:
        for _ in range(3):
            await seed_run(db, schedule)
            await replica.executor.claim_and_start()
            await replica.idle_again()
        assert read == [1]
        await db.execute(
            """UPDATE schedule SET version = 2, target = jsonb_set(target, '{url}', '"http://new.example/"')"""
        )
        await seed_run(db, schedule)
        await replica.executor.claim_and_start()
        await replica.idle_again()
    assert read == [1, 1]
    assert [call.target.url for call in replica.deliverer.calls][2:] == [
        "http://127.0.0.1:9/",
        "http://new.example/",
    ]


async def test_what_a_claim_returns_after_the_stop_goes_back_unsent(
    dsn: str, db: Connection, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 3)
    async with _replica(dsn, pool) as replica:
        real = replica.claims.claim

        async def stopped_meanwhile(limit: int) -> list[ClaimedRun]:
            runs = await real(limit)
            assert len(runs) == 3
            replica.executor.stop_taking()
            return runs

        monkeypatch.setattr(replica.claims, "claim", stopped_meanwhile)
        await replica.executor.claim_and_start()
        assert await replica.stop() == 0
    for ref in refs:
        row = await run_row(db, ref)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("pending", 0, None)
    assert replica.deliverer.calls == []


async def test_a_drain_lets_what_is_in_flight_finish(dsn: str, db: Connection, pool: Pool) -> None:
    await seed_runs(db, await seed_schedule(db), 8)
    answer = asyncio.Event()

    async def answers_later(call: Call) -> Outcome:
        call.send()
        await answer.wait()
        return DONE

    async with _replica(dsn, pool, answers_later) as replica:
        replica.start()
        await eventually(lambda: replica.deliverer.sent == 8)
        draining = asyncio.create_task(replica.stop(grace=LONG))
        await eventually(lambda: replica.turning is None)
        answer.set()
        assert await draining == 0
    assert await _statuses(db) == {"succeeded": 8}


async def test_past_the_grace_what_may_have_left_is_retried_and_what_never_left_is_given_back(
    dsn: str, db: Connection, pool: Pool
) -> None:
    unconnected = await seed_schedule(db, target=Target("POST", "http://unconnected.example/", (), None))
    given_back = await seed_runs(db, unconnected, 4)
    spent = await seed_runs(db, await seed_schedule(db), 4)

    async def by_target(call: Call) -> Outcome:
        script = hangs_before_sending if "unconnected" in call.target.url else hangs_after_sending
        return await script(call)

    async with _replica(dsn, pool, by_target) as replica:
        replica.start()
        await eventually(lambda: len(replica.deliverer.calls) == 8)
        assert await replica.stop(grace=NOW) == 0
        assert replica.load.idle == 20
    for ref in given_back:
        row = await run_row(db, ref)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("pending", 0, None)
        assert await attempt_rows(db, ref) == []
    for ref in spent:
        row = await run_row(db, ref)
        assert (row["status"], row["attempt"], row["claimed_by"]) == ("retrying", 1, None)
        assert [row["outcome"] for row in await attempt_rows(db, ref)] == ["abandoned"]


async def test_hurrying_ends_the_grace(dsn: str, db: Connection, pool: Pool) -> None:
    await seed_runs(db, await seed_schedule(db), 3)
    async with _replica(dsn, pool, hangs_after_sending) as replica:
        replica.start()
        await eventually(lambda: replica.deliverer.sent == 3)
        draining = asyncio.create_task(replica.stop(grace=timedelta(hours=1)))
        await eventually(lambda: replica.turning is None)
        replica.executor.hurry()
        assert await asyncio.wait_for(draining, timeout=60) == 0
    assert await _statuses(db) == {"retrying": 3}


async def test_hurrying_before_the_drain_abandons_at_once(dsn: str, db: Connection, pool: Pool) -> None:
    await seed_runs(db, await seed_schedule(db), 3)
    async with _replica(dsn, pool, hangs_after_sending) as replica:
        replica.start()
        await eventually(lambda: replica.deliverer.sent == 3)
        replica.executor.hurry()
        assert await asyncio.wait_for(replica.stop(grace=timedelta(hours=1)), timeout=60) == 0


async def test_a_drain_without_anything_in_flight_ends_at_once(dsn: str, db: Connection, pool: Pool) -> None:
    async with _replica(dsn, pool) as replica:
        replica.start()
        assert await asyncio.wait_for(replica.stop(grace=timedelta(hours=1)), timeout=60) == 0


async def test_a_drain_while_the_database_is_away_is_bounded_and_tells_what_is_left(
    dsn: str, db: Connection
) -> None:
    await seed_runs(db, await seed_schedule(db), 3)
    async with tcp_proxy(dsn) as (proxy, address):
        pool = await create_pool(address, size=4, application_name="behind a proxy")
        try:
            async with _replica(dsn, pool, hangs_after_sending) as replica:
                replica.start()
                await eventually(lambda: replica.deliverer.sent == 3)
                proxy.go_away()
                left = await replica.stop(grace=NOW, settle_within=timedelta(milliseconds=50))
                assert left == 3
                proxy.come_back()
        finally:
            await close_pool(pool)
    # What the settler still had was written when the database was back: it outlives its workers.
    assert await _statuses(db) == {"retrying": 3}


async def test_the_keeper_holds_a_run_from_its_claim_to_its_settlement(
    dsn: str, db: Connection, pool: Pool
) -> None:
    await seed_runs(db, await seed_schedule(db), 4)
    async with _replica(dsn, pool, hangs_after_sending) as replica:
        replica.start()
        await eventually(lambda: replica.deliverer.sent == 4)
        assert replica.desk.keeper.held == 4
        await replica.stop(grace=NOW)
        assert replica.desk.keeper.held == 0


async def test_a_run_that_another_ended_meanwhile_frees_its_slot(
    dsn: str, db: Connection, pool: Pool
) -> None:
    await seed_run(db)
    async with _replica(dsn, pool, hangs_after_sending) as replica:
        replica.start()
        await eventually(lambda: replica.deliverer.sent == 1)
        [hold] = replica.desk.keeper._holds
        await settlements.complete(db, [Settled(hold.lease, Complete(), evidence())])
        await replica.desk.keeper.extend_all()
        await replica.idle_again()
        assert replica.load.idle == 20
