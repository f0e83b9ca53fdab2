from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from app import metrics
from app.domain.outcome import Answer, Delivered, Rejected, Timing
from app.domain.run import (
    Cancel,
    Complete,
    Defer,
    Evidence,
    Fail,
    Lease,
    Reason,
    Release,
    Retry,
    Settled,
    Settlement,
)
from app.errors import RowRefused
from app.executor import settler as settling
from app.executor.settler import Settler
from app.store import settlements
from app.store.leases import Key
from app.store.pool import Connection, Pool, close_pool, create_pool
from tests.eventually import eventually
from tests.factories_runs import (
    DELIVERED,
    SECOND,
    attempt_rows,
    claim,
    claim_one,
    evidence,
    expire,
    leases_of,
    run_row,
    seed_run,
    seed_runs,
    seed_schedule,
)
from tests.tcp_proxy import TcpProxy, tcp_proxy

BATCH = 200


@asynccontextmanager
async def _running(
    pool: Pool, *, batch: int = BATCH, wait: timedelta = timedelta()
) -> AsyncIterator[Settler]:
    """A settler at work; at the end everything that was given to it is written."""
    settler = Settler(pool, batch=batch, wait=wait, rng=random.Random(5))
    work = asyncio.create_task(settler.run())
    try:
        yield settler
    finally:
        settler.finish()
        await asyncio.wait_for(work, timeout=60)


@pytest.fixture
async def settler(pool: Pool) -> AsyncIterator[Settler]:
    async with _running(pool) as running:
        yield running


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the groups that were completed, in order."""
    sizes: list[int] = []
    real = settlements.complete

    async def counted(conn: Connection, items: Sequence[Settled]) -> set[Key]:
        sizes.append(len(items))
        return await real(conn, items)

    _replace_complete(monkeypatch, counted)
    return sizes


def _replace_complete(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Connection, Sequence[Settled]], Awaitable[set[Key]]]
) -> None:
    monkeypatch.setitem(settling._VERBS, Complete, write)


async def _held(db: Connection, amount: int) -> list[Lease]:
    await seed_runs(db, await seed_schedule(db), amount)
    return leases_of(await claim(db, limit=amount))


def _completed(lease: Lease, proof: Evidence | None = None) -> Settled:
    return Settled(lease, Complete(), proof or evidence())


async def _settle_all(settler: Settler, items: Sequence[Settled]) -> list[bool]:
    return await asyncio.wait_for(asyncio.gather(*(settler.settle(item) for item in items)), timeout=60)


def _count(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(f"scheduler_{name}_total", labels) or 0.0


async def test_results_that_come_together_are_written_together_up_to_the_batch(
    db: Connection, pool: Pool, groups: list[int]
) -> None:
    held = await _held(db, 50)
    async with _running(pool, batch=20) as settler:
        assert await _settle_all(settler, [_completed(lease) for lease in held]) == [True] * 50
    assert groups == [20, 20, 10]
    assert await db.fetchval("SELECT count(*) FROM job_run WHERE status = 'succeeded'") == 50
    assert await db.fetchval("SELECT count(*) FROM run_attempt") == 50


async def test_a_lone_result_waits_a_moment_for_company(
    db: Connection, pool: Pool, groups: list[int]
) -> None:
    one, two = await _held(db, 2)
    async with _running(pool, wait=SECOND) as settler:
        first = asyncio.create_task(settler.settle(_completed(one)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert await settler.settle(_completed(two))
        assert await first
    assert groups == [2]


async def test_a_group_of_mixed_settlements_is_written_verb_by_verb(db: Connection, settler: Settler) -> None:
    held = await _held(db, 6)
    settlements_of_each: list[tuple[Settlement, Evidence | None, tuple[str, int, int]]] = [
        (Complete(), evidence(), ("succeeded", 1, 1)),
        (Retry(SECOND), evidence(), ("retrying", 1, 1)),
        (Fail(Reason.NOT_RETRYABLE), evidence(), ("failed", 1, 1)),
        (Cancel(Reason.OVERLAP), None, ("cancelled", 0, 0)),
        (Defer(SECOND, Reason.OVERLAP), None, ("pending", 0, 0)),
        (Release(), None, ("pending", 0, 0)),
    ]
    before = {name: _count("settled", settlement=name) for name in ("complete", "release")}
    items = [
        Settled(lease, what, proof) for lease, (what, proof, _) in zip(held, settlements_of_each, strict=True)
    ]
    assert await _settle_all(settler, items) == [True] * 6
    for lease, (_, _, expected) in zip(held, settlements_of_each, strict=True):
        row = await run_row(db, lease.ref)
        assert (row["status"], row["attempt"], len(await attempt_rows(db, lease.ref))) == expected
        assert row["claimed_by"] is None
    assert {name: _count("settled", settlement=name) - before[name] for name in before} == {
        "complete": 1,
        "release": 1,
    }


async def test_a_lost_lease_is_told_to_its_worker_only(db: Connection, settler: Settler) -> None:
    lost, kept = await _held(db, 2)
    await expire(db, lost.ref)
    await claim_one(db, "two")
    before = _count("lease_lost")
    assert await _settle_all(settler, [_completed(lost), _completed(kept)]) == [False, True]
    assert _count("lease_lost") == before + 1


async def test_two_leases_of_this_replica_on_one_run_get_their_own_answers(
    db: Connection, settler: Settler
) -> None:
    ref = await seed_run(db)
    old = (await claim_one(db)).lease
    await expire(db, ref)
    new = (await claim_one(db)).lease
    assert await _settle_all(settler, [_completed(old), _completed(new)]) == [False, True]
    assert [row["lease_token"] for row in await attempt_rows(db, ref)] == [old.token, new.token]


def _answered(excerpt: str = "", *, status: int = 200, total: timedelta = timedelta()) -> Evidence:
    return evidence(Delivered(Answer(status, (), excerpt, truncated=False), Timing(total=total)))


POISON = {
    "NUL": _answered("a\0b"),
    "surrogate": _answered("\ud800"),
    "status beyond int4": _answered(status=2**31),
    "duration beyond int4": _answered(total=timedelta(days=30)),
}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("place", [0, 117, 199])
async def test_one_result_that_cannot_be_stored_costs_199_others_nothing(
    db: Connection, settler: Settler, poison: str, place: int
) -> None:
    held = await _held(db, 200)
    items = [_completed(lease) for lease in held]
    items[place] = _completed(held[place], POISON[poison])
    before = _count("settle_refused")
    assert await _settle_all(settler, items) == [True] * 200
    row = await run_row(db, held[place].ref)
    assert (row["status"], row["reason"], row["claimed_by"]) == ("failed", "settlement_refused", None)
    assert await db.fetchval("SELECT count(*) FROM job_run WHERE status = 'succeeded'") == 199
    assert await db.fetchval("SELECT count(*) FROM run_attempt") == 199
    assert _count("settle_refused") == before + 1


async def test_a_result_refused_even_as_a_bare_failure_is_left_to_the_reaper(
    db: Connection, settler: Settler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(conn: Connection, item: Settled, *, reason: Reason) -> bool:
        raise RowRefused

    monkeypatch.setattr(settlements, "mark_failed", refuse)
    bad, good = await _held(db, 2)
    assert await _settle_all(settler, [_completed(bad, POISON["NUL"]), _completed(good)]) == [False, True]
    assert (await run_row(db, bad.ref))["claimed_by"] == bad.token


async def test_a_fault_of_ours_in_one_result_fails_that_run_and_no_other(
    db: Connection, settler: Settler
) -> None:
    bad, *good = await _held(db, 5)
    nonsense: Any = "not an outcome"
    items = [_completed(bad, evidence(nonsense)), *(_completed(lease) for lease in good)]
    assert await _settle_all(settler, items) == [True] * 5
    row = await run_row(db, bad.ref)
    assert (row["status"], row["reason"]) == ("failed", "internal_error")
    assert await db.fetchval("SELECT count(*) FROM job_run WHERE status = 'succeeded'") == 4


async def test_a_fault_that_passes_fails_nobody(
    db: Connection, settler: Settler, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = settlements.complete
    faults = [RuntimeError("once")]

    async def faulty(conn: Connection, items: Sequence[Settled]) -> set[Key]:
        if faults:
            raise faults.pop()
        return await real(conn, items)

    _replace_complete(monkeypatch, faulty)
    [lease] = await _held(db, 1)
    assert await settler.settle(_completed(lease))
    assert (await run_row(db, lease.ref))["status"] == "succeeded"


@asynccontextmanager
async def _behind_proxy(dsn: str) -> AsyncIterator[tuple[TcpProxy, Settler]]:
    async with tcp_proxy(dsn) as (proxy, address):
        pool = await create_pool(address, size=2, application_name="a settler behind a proxy")
        try:
            async with _running(pool) as settler:
                yield proxy, settler
                proxy.come_back()
        finally:
            await close_pool(pool)


async def test_while_the_database_is_away_results_wait_and_are_written_once_when_it_is_back(
    dsn: str, db: Connection
) -> None:
    held = await _held(db, 5)
    async with _behind_proxy(dsn) as (proxy, settler):
        proxy.go_away()
        waiting = asyncio.create_task(_settle_all(settler, [_completed(lease) for lease in held]))
        await eventually(lambda: proxy.refused >= 3)
        assert not waiting.done()
        proxy.come_back()
        assert await waiting == [True] * 5
    assert await db.fetchval("SELECT count(*) FROM run_attempt") == 5


SETTLING: list[tuple[Settlement, str]] = [
    (Complete(), "succeeded"),
    (Retry(timedelta()), "retrying"),
    (Fail(Reason.NOT_RETRYABLE), "failed"),
    (Cancel(Reason.CANCELLED), "cancelled"),
]
each_settlement = pytest.mark.parametrize(("settlement", "status"), SETTLING, ids=[x[1] for x in SETTLING])


@each_settlement
async def test_a_commit_that_happened_and_whose_answer_was_lost_counts_as_written(
    dsn: str, db: Connection, settlement: Settlement, status: str
) -> None:
    first, second = await _held(db, 2)
    async with _behind_proxy(dsn) as (proxy, settler):
        assert await settler.settle(Settled(first, settlement, evidence()))  # the statement is prepared
        proxy.losing.set()
        assert await settler.settle(Settled(second, settlement, evidence()))
    assert proxy.lost == 1
    assert (await run_row(db, second.ref))["status"] == status
    assert [row["lease_token"] for row in await attempt_rows(db, second.ref)] == [second.token]


async def test_a_commit_that_happened_is_known_by_its_evidence_also_when_the_run_was_claimed_since(
    dsn: str, db: Connection
) -> None:
    first, second = await _held(db, 2)
    async with _behind_proxy(dsn) as (proxy, settler):
        assert await settler.settle(Settled(first, Retry(timedelta(hours=1)), evidence()))
        proxy.losing.set()
        proxy.is_away = True
        writing = asyncio.create_task(settler.settle(Settled(second, Retry(timedelta()), evidence())))
        await eventually(lambda: proxy.refused >= 1)
        again = (await claim_one(db, "two")).lease
        assert again.ref.id == second.ref.id
        proxy.come_back()
        assert await asyncio.wait_for(writing, timeout=60)
    row = await run_row(db, second.ref)
    assert (row["attempt"], row["claimed_by"]) == (2, again.token)
    assert [row["outcome"] for row in await attempt_rows(db, second.ref)] == ["delivered"]


@each_settlement
async def test_a_commit_cut_off_before_it_happened_is_written_by_its_repetition(
    db: Connection, settler: Settler, settlement: Settlement, status: str
) -> None:
    [lease] = await _held(db, 1)
    async with db.transaction():
        await db.execute("SELECT FROM job_run WHERE id = $1 FOR UPDATE", lease.ref.id)
        writing = asyncio.create_task(settler.settle(Settled(lease, settlement, evidence())))
        backend = await eventually(lambda: _waiting_backend(db))
        await db.execute("SELECT pg_terminate_backend($1)", backend)
        await eventually(lambda: _is_gone(db, backend))
    assert await asyncio.wait_for(writing, timeout=60)
    assert (await run_row(db, lease.ref))["status"] == status
    assert len(await attempt_rows(db, lease.ref)) == 1


async def _waiting_backend(db: Connection) -> int:
    return await db.fetchval("SELECT pid FROM pg_locks WHERE NOT granted LIMIT 1") or 0


async def _is_gone(db: Connection, backend: int) -> bool:
    # Not pg_stat_activity: a transaction goes on seeing what that said first.
    gone: bool = await db.fetchval("SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = $1)", backend)
    return gone


async def test_a_commit_of_unknown_outcome_that_did_not_happen_before_the_lease_was_lost_is_lost(
    dsn: str, db: Connection
) -> None:
    lost, kept = await _held(db, 2)
    async with _behind_proxy(dsn) as (proxy, settler):
        proxy.go_away()
        writing = asyncio.create_task(_settle_all(settler, [_completed(lost), _completed(kept)]))
        await eventually(lambda: proxy.refused >= 1)
        await expire(db, lost.ref)
        await claim_one(db, "two")
        proxy.come_back()
        assert await writing == [False, True]
    assert [row["outcome"] for row in await attempt_rows(db, lost.ref)] == ["lease_lost"]


async def test_a_deadlock_is_repeated_and_not_taken_for_a_refusal(
    db: Connection, settler: Settler, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = settlements.complete
    turns: list[int] = []

    async def deadlocked_once(conn: Connection, items: Sequence[Settled]) -> set[Key]:
        turns.append(len(items))
        if len(turns) == 1:
            await conn.execute("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$")
        return await real(conn, items)

    _replace_complete(monkeypatch, deadlocked_once)
    held = await _held(db, 3)
    assert await _settle_all(settler, [_completed(lease) for lease in held]) == [True] * 3
    assert turns == [3, 3]


async def test_finish_writes_everything_that_was_given_before(db: Connection, pool: Pool) -> None:
    held = await _held(db, 45)
    async with _running(pool, batch=10, wait=timedelta(hours=1)) as settler:
        waiting = [asyncio.create_task(settler.settle(_completed(lease))) for lease in held]
        await asyncio.sleep(0)
    assert [task.result() for task in waiting] == [True] * 45


async def test_a_result_whose_worker_was_cancelled_is_written_all_the_same(
    db: Connection, pool: Pool
) -> None:
    [lease] = await _held(db, 1)
    async with _running(pool) as settler:
        worker = asyncio.create_task(settler.settle(_completed(lease, evidence(DELIVERED))))
        await asyncio.sleep(0)
        worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert (await run_row(db, lease.ref))["status"] == "succeeded"


async def test_a_rejected_answer_is_kept_with_its_retry(db: Connection, settler: Settler) -> None:
    [lease] = await _held(db, 1)
    outcome = Rejected(Answer(503, (), "busy", truncated=False), Timing())
    assert await settler.settle(Settled(lease, Retry(SECOND), evidence(outcome)))
    [row] = await attempt_rows(db, lease.ref)
    assert (row["outcome"], row["status_code"], row["response_excerpt"]) == ("rejected", 503, "busy")
