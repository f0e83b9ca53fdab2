from __future__ import annotations

import asyncio
import random
from datetime import datetime, timedelta

import pytest

from app.domain.run import Cancel, Complete, Defer, Fail, Reason, Release, Retry, RunRef, Settled, Settlement
from app.store import leases, settlements
from app.store.claims import LEFT_END, Cursor
from app.store.leases import Reaped, key_of
from app.store.pool import PLAN_GUARDS, Connection, Pool, acquire, close, connect
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


SLOWLY = """
CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.001);
    RETURN new;
END $$;
CREATE TRIGGER slowly BEFORE UPDATE ON job_run FOR EACH ROW EXECUTE FUNCTION slowly();
"""


async def test_verbs_that_meet_on_the_same_runs_deadlock_nobody(dsn: str, db: Connection) -> None:
    """All take their rows in one order, however they were given. Rows are locked slowly here, so that they do meet."""
    await seed_runs(db, await seed_schedule(db), 60)
    held = leases_of(await claim(db, limit=60))
    await db.execute(SLOWLY)
    rng = random.Random(8)
    # A nested loop takes the rows in the order of the arrays, as it does on large tables.
    settings = {**PLAN_GUARDS, "deadlock_timeout": "20ms"}

    async def write(settlement: Settlement) -> int:
        conn = await connect(dsn, application_name="a settler", settings=settings)
        try:
            items = [Settled(lease, settlement, evidence()) for lease in rng.sample(held, 60)]
            match settlement:
                case Complete():
                    return len(await settlements.complete(conn, items))
                case Retry():
                    return len(await settlements.retry(conn, items))
                case Fail():
                    return len(await settlements.fail(conn, items))
                case Cancel():
                    return len(await settlements.cancel(conn, items))
                case Defer():
                    return len(await leases.defer(conn, items))
                case Release():
                    return len(await leases.release(conn, [item.lease for item in items]))
        finally:
            await close(conn)

    async def keep() -> None:
        conn = await connect(dsn, application_name="a keeper", settings=settings)
        try:
            for _ in range(5):
                await leases.extend(conn, rng.sample(held, 60), ttl=TTL)
        finally:
            await close(conn)

    all_kinds: list[Settlement] = [
        Complete(),
        Retry(SECOND),
        Fail(Reason.NOT_RETRYABLE),
        Cancel(Reason.CANCELLED),
        Defer(SECOND, Reason.OVERLAP),
        Release(),
    ]
    async with asyncio.TaskGroup() as group:
        group.create_task(keep())
        writing = [group.create_task(write(settlement)) for settlement in all_kinds]
    assert sum(task.result() for task in writing) == 60


async def test_an_extend_waits_for_nobody_while_everything_is_being_settled(
    dsn: str, db: Connection, pool: Pool
) -> None:
    await seed_runs(db, await seed_schedule(db), 20)
    held = leases_of(await claim(db, limit=20))
    async with acquire(pool) as settler, settler.transaction():
        await settlements.complete(settler, [Settled(lease, Complete(), evidence()) for lease in held[:15]])
        extended = await leases.extend(db, held, ttl=TTL)
        assert extended.busy == set(held[:15])
        assert extended.kept == set(held[15:])
    assert (await leases.extend(db, held, ttl=TTL)).lost == set(held[:15])
