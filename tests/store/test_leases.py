from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest

from app.domain.run import Complete, Defer, Reason, RunRef, Settled
from app.store import leases, settlements
from app.store.claims import LEFT_END, Cursor
from app.store.leases import Reaped, key_of
from app.store.pool import Connection, Pool, acquire, close, connect
from tests.factories_runs import (
    SECOND,
    TTL,
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
    set_run,
)


async def _reap(conn: Connection, *, behind: Cursor = LEFT_END, limit: int = 1000) -> Reaped:
    return await leases.reap(conn, behind=behind, limit=limit, longest=TTL)


async def test_extend_tells_kept_busy_and_lost_apart_without_waiting(db: Connection, pool: Pool) -> None:
    await seed_runs(db, await seed_schedule(db), 4, due_ago=9 * SECOND, apart=SECOND)
    kept, busy, ended, taken = leases_of(await claim(db))
    await settlements.complete(db, [Settled(ended, Complete(), evidence())])
    await expire(db, taken.ref)
    await claim_one(db, "two")
    before = await run_row(db, busy.ref)
    async with acquire(pool) as holder, holder.transaction():
        await holder.execute("SELECT FROM job_run WHERE id = $1 FOR UPDATE", busy.ref.id)
        extended = await leases.extend(db, [taken, ended, busy, kept], ttl=2 * TTL)
    assert extended.kept == {kept}
    assert extended.busy == {busy}
    assert extended.lost == {ended, taken}
    assert extended.cancel_requested == frozenset()
    assert await run_row(db, busy.ref) == before


async def test_extend_moves_the_end_of_the_lease_and_nothing_else(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db, ttl=SECOND)).lease
    before = await run_row(db, ref)
    await leases.extend(db, [lease], ttl=timedelta(hours=1))
    after = await run_row(db, ref)
    assert after.pop("claim_expires_at") > before.pop("claim_expires_at") + timedelta(minutes=50)  # type: ignore[operator]
    assert after == before


async def test_extend_tells_of_a_cancel_request_on_kept_and_on_busy_leases(
    db: Connection, pool: Pool
) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 2, due_ago=9 * SECOND, apart=SECOND)
    kept, busy = leases_of(await claim(db))
    for ref in refs:
        await request_cancel(db, ref)
    async with acquire(pool) as holder, holder.transaction():
        await holder.execute("SELECT FROM job_run WHERE id = $1 FOR UPDATE", busy.ref.id)
        extended = await leases.extend(db, [kept, busy], ttl=TTL)
    assert extended.cancel_requested == {kept, busy}


async def test_extending_nothing_asks_for_nothing(db: Connection) -> None:
    extended = await leases.extend(db, [], ttl=TTL)
    assert extended == leases.Extended(frozenset(), frozenset(), frozenset(), frozenset())


async def test_release_makes_the_run_due_again_and_does_not_spend_the_attempt(db: Connection) -> None:
    ref = await seed_run(db)
    before = await run_row(db, ref)
    lease = (await claim_one(db)).lease
    assert await leases.release(db, [lease]) == {key_of(lease)}
    assert await run_row(db, ref) == before
    assert (await claim_one(db)).lease.attempt == 1
    assert await attempt_rows(db, ref) == []


async def test_defer_puts_the_run_off_and_does_not_spend_the_attempt(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    item = Settled(lease, Defer(timedelta(hours=1), Reason.OVERLAP), None)
    now: datetime = await db.fetchval("SELECT now()")
    assert await leases.defer(db, [item]) == {key_of(lease)}
    row = await run_row(db, ref)
    assert (row["status"], row["attempt"], row["claimed_by"], row["reason"]) == (
        "pending",
        0,
        None,
        "overlap",
    )
    assert row["fire_after"] >= now + timedelta(hours=1)  # type: ignore[operator]
    assert await claim(db) == []


async def test_a_cancel_request_does_not_wait_for_the_end_of_a_deferral(db: Connection) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    await request_cancel(db, ref)
    await leases.defer(db, [Settled(lease, Defer(timedelta(hours=1), Reason.OVERLAP), None)])
    assert (await claim_one(db)).is_cancel_requested


async def test_the_reaper_frees_expired_leases_with_evidence_and_leaves_live_ones(db: Connection) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 2, due_ago=9 * SECOND, apart=SECOND)
    dead, live = leases_of(await claim(db))
    await expire(db, dead.ref)
    before = await run_row(db, live.ref)
    reaped = await _reap(db)
    assert reaped == Reaped(freed=[refs[0]], ended=0, go_on_behind=None)
    row = await run_row(db, dead.ref)
    assert (row["status"], row["attempt"], row["claimed_by"]) == ("retrying", 1, None)
    [lost] = await attempt_rows(db, dead.ref)
    assert (lost["attempt"], lost["outcome"], lost["lease_token"]) == (1, "lease_lost", dead.token)
    assert await run_row(db, live.ref) == before
    assert (await claim_one(db)).lease.attempt == 2


async def test_the_reaper_fails_a_run_whose_attempts_are_spent(db: Connection) -> None:
    ref = await seed_run(db, attempt=4, max_attempts=5)
    lease = (await claim_one(db)).lease
    await expire(db)
    assert await _reap(db) == Reaped(freed=[], ended=1, go_on_behind=None)
    row = await run_row(db, ref)
    assert (row["status"], row["reason"], row["attempt"]) == ("failed", "attempts_spent", 5)
    assert row["finished_at"] is not None
    assert [(r["attempt"], r["lease_token"]) for r in await attempt_rows(db, ref)] == [(5, lease.token)]


async def test_the_reaper_cancels_a_run_that_was_to_be_cancelled(db: Connection) -> None:
    ref = await seed_run(db)
    await claim_one(db)
    await request_cancel(db, ref)
    await expire(db)
    assert (await _reap(db)).ended == 1
    row = await run_row(db, ref)
    assert (row["status"], row["reason"], row["claimed_by"]) == ("cancelled", "cancelled", None)
    assert len(await attempt_rows(db, ref)) == 1


async def test_a_pass_of_the_reaper_is_bounded_and_goes_on_where_it_stopped(db: Connection) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 5, due_ago=9 * SECOND, apart=SECOND)
    await claim(db)
    await expire(db)
    freed: list[RunRef] = []
    behind: Cursor | None = LEFT_END
    passes = 0
    while behind is not None:
        reaped = await _reap(db, behind=behind, limit=2)
        assert len(reaped.freed) <= 2
        freed += reaped.freed
        behind = reaped.go_on_behind
        passes += 1
    assert sorted(freed, key=lambda ref: ref.fire_after) == refs
    assert passes == 3


async def test_a_slice_without_anything_expired_is_passed_over(db: Connection) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 3, due_ago=9 * SECOND, apart=SECOND)
    await claim(db)
    await expire(db, refs[2])
    first = await _reap(db, limit=2)
    assert (first.freed, first.ended) == ([], 0)
    assert first.go_on_behind == Cursor(refs[1].fire_after, refs[1].id)
    assert (await _reap(db, behind=first.go_on_behind, limit=2)).freed == [refs[2]]


async def test_one_replica_reaps_at_a_time(db: Connection, pool: Pool) -> None:
    refs = await seed_runs(db, await seed_schedule(db), 2, due_ago=9 * SECOND, apart=SECOND)
    await claim(db)
    await expire(db)
    async with acquire(pool) as other, other.transaction():
        await _reap(other, behind=Cursor(refs[1].fire_after, refs[1].id), limit=1)
        before = await everything(db)
        assert await _reap(db) == Reaped(freed=[], ended=0, go_on_behind=None)
        assert await everything(db) == before
    assert len((await _reap(db)).freed) == 2


async def test_the_reaper_passes_over_a_row_that_is_being_settled(db: Connection, pool: Pool) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    await expire(db)
    async with acquire(pool) as owner, owner.transaction():
        await settlements.complete(owner, [Settled(lease, Complete(), evidence())])
        assert (await _reap(db)).freed == []
    assert (await _reap(db)).freed == []
    assert (await run_row(db, ref))["status"] == "succeeded"
    assert [row["outcome"] for row in await attempt_rows(db, ref)] == ["delivered"]


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(days=3650)])
async def test_a_lease_that_no_grant_allows_is_cut_to_a_lawful_length(
    db: Connection, ahead: timedelta
) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    now: datetime = await db.fetchval("SELECT now()")
    await set_run(db, ref, claim_expires_at=now + ahead)
    assert await _reap(db) == Reaped(freed=[], ended=0, go_on_behind=None)
    row = await run_row(db, ref)
    assert now + TTL <= row["claim_expires_at"] < now + ahead  # type: ignore[operator]
    assert row["claimed_by"] == lease.token  # its owner may still be at it
    await expire(db)
    assert len((await _reap(db)).freed) == 1


async def test_extending_everything_while_everything_is_settled_deadlocks_nobody(
    dsn: str, db: Connection
) -> None:
    """Both take the rows in one order, however they were given."""
    schedule = await seed_schedule(db)
    await seed_runs(db, schedule, 300)
    held = leases_of(await claim(db, limit=300))

    async def extend_backwards() -> None:
        conn = await connect(dsn, application_name="a keeper")
        try:
            for turn in range(15):
                await leases.extend(conn, held[:: -1 if turn % 2 else 1], ttl=TTL)
        finally:
            await close(conn)

    async def settle_in(order: list[int]) -> int:
        """Settles the same leases as others do, each group in an order of its own."""
        conn = await connect(dsn, application_name="a settler")
        written = 0
        try:
            for start in range(0, 300, 50):
                part = [held[place] for place in order[start : start + 50]]
                written += len(
                    await settlements.complete(conn, [Settled(x, Complete(), evidence()) for x in part])
                )
        finally:
            await close(conn)
        return written

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(extend_backwards())
        settlers = [
            group.create_task(settle_in(order))
            for order in (
                list(range(300)),
                list(range(299, -1, -1)),
                sorted(range(300), key=lambda n: n * 7 % 300),
            )
        ]
    assert sum(task.result() for task in settlers) == 300
    assert await db.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
