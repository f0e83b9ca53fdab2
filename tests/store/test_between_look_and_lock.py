"""What changes between a statement's snapshot and its row lock is seen: the newest version of a row decides.

The statements are stopped in that gap by a `now()` (or a lock function) of the test's own, first in the search path,
that waits for an advisory lock. With a generic plan it is asked for the first time after the snapshot was taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import pytest

from app.domain.run import ClaimedRun, Complete, Lease, Retry, RunRef, Settled
from app.store import claims, leases, settlements
from app.store.claims import LEFT_END, Share
from app.store.pool import PLAN_GUARDS, Connection, close, connect
from tests.eventually import eventually
from tests.factories_runs import (
    SECOND,
    TTL,
    attempt_rows,
    claim_one,
    evidence,
    expire,
    grant,
    run_row,
    seed_run,
    seed_runs,
    seed_schedule,
)

GATE = """
CREATE SCHEMA gate;
CREATE FUNCTION gate.wait() RETURNS void LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM pg_advisory_lock_shared(4711);
    PERFORM pg_advisory_unlock_shared(4711);
END $$;
CREATE FUNCTION gate.now() RETURNS timestamptz LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM gate.wait();
    RETURN pg_catalog.now();
END $$;
"""


@pytest.fixture
def dsn(each_server_dsn: str) -> str:
    """All of this on the oldest supported server too: the rules of row locks are the server's."""
    return each_server_dsn


@pytest.fixture
async def gated(dsn: str, db: Connection) -> AsyncIterator[Connection]:
    """A connection whose statements stop behind their snapshot while `db` holds the gate's lock."""
    await db.execute(GATE)
    opened = await connect(
        dsn,
        application_name="carillon tests, gated",
        settings={**PLAN_GUARDS, "search_path": "gate, pg_catalog, public"},
    )
    yield opened
    await close(opened)


async def _held_up(
    db: Connection, statement: Awaitable[list[RunRef]], change: Callable[[], Awaitable[object]]
) -> list[RunRef]:
    """Start the statement, make the change in its gap, and return what the statement answers."""
    await db.execute("SELECT pg_advisory_lock(4711)")
    try:
        running = asyncio.ensure_future(statement)
        await eventually(lambda: _is_waiting(db))
        await change()
    finally:
        await db.execute("SELECT pg_advisory_unlock(4711)")
    return await running


async def _is_waiting(conn: Connection) -> bool:
    waiting: bool = await conn.fetchval(
        "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
    )
    return waiting


async def _due(conn: Connection, refs: list[RunRef]) -> list[ClaimedRun]:
    return await claims.claim_due(conn, grant("late"), limit=len(refs))


async def _ring(conn: Connection, refs: list[RunRef]) -> list[ClaimedRun]:
    return await claims.claim_ring(
        conn, grant("late"), shares=[Share(refs[0].tenant_id, len(refs), LEFT_END)]
    )


async def _hinted(conn: Connection, refs: list[RunRef]) -> list[ClaimedRun]:
    return await claims.claim_hinted(conn, grant("late"), refs=refs)


each_claim = pytest.mark.parametrize("claim_these", [_due, _ring, _hinted], ids=["due", "ring", "hinted"])
ClaimThese = Callable[[Connection, list[RunRef]], Awaitable[list[ClaimedRun]]]


async def _refs(claimed: Awaitable[list[ClaimedRun]]) -> list[RunRef]:
    return [run.lease.ref for run in await claimed]


async def _complete(db: Connection, lease: Lease) -> None:
    assert await settlements.complete(db, [Settled(lease, Complete(), evidence())])


async def _retry(db: Connection, lease: Lease) -> None:
    assert await settlements.retry(db, [Settled(lease, Retry(timedelta(hours=1)), evidence())])


async def _extend(db: Connection, lease: Lease) -> None:
    assert (await leases.extend(db, [lease], ttl=TTL)).kept == {lease}


async def _take_over(db: Connection, lease: Lease) -> None:
    await claim_one(db, "faster")


async def _reap_and_claim(db: Connection, lease: Lease) -> None:
    await leases.reap(db, behind=LEFT_END, limit=99, longest=TTL)
    await claim_one(db, "faster")


async def _delete(db: Connection, lease: Lease) -> None:
    await db.execute("DELETE FROM job_run WHERE id = $1", lease.ref.id)


CHANGES = pytest.mark.parametrize(
    "change",
    [_complete, _retry, _extend, _take_over, _reap_and_claim, _delete],
    ids=lambda change: change.__name__.strip("_"),
)
Change = Callable[[Connection, Lease], Awaitable[None]]


@CHANGES
@each_claim
async def test_a_claim_leaves_an_expired_run_that_was_saved_in_the_gap_and_fills_its_limit(
    db: Connection, gated: Connection, claim_these: ClaimThese, change: Change
) -> None:
    schedule = await seed_schedule(db)
    ref = await seed_run(db, schedule, due_ago=9 * SECOND)
    saved = (await claim_one(db)).lease
    assert await claim_these(gated, [ref]) == []  # makes the plan; the lease is live
    others = await seed_runs(db, schedule, 2, due_ago=5 * SECOND, apart=SECOND)
    await expire(db, ref)
    taken = await _held_up(db, _refs(claim_these(gated, [ref, others[0]])), lambda: change(db, saved))
    wanted = others if claim_these is not _hinted else others[:1]
    assert taken == wanted
    assert not any("late/" in str(row["lease_token"]) for row in await attempt_rows(db, ref))


@each_claim
async def test_a_run_claimed_and_lost_in_the_gap_counts_from_its_newest_attempt(
    db: Connection, gated: Connection, claim_these: ClaimThese
) -> None:
    ref = await seed_run(db, due_ago=-SECOND * 3600)
    assert await claim_these(gated, [ref]) == []  # makes the plan; it is not due
    await db.execute("UPDATE job_run SET fire_after = now() - interval '1 second'")

    async def lose_once() -> None:
        await claim_one(db)
        await expire(db, ref)
        await leases.reap(db, behind=LEFT_END, limit=99, longest=TTL)

    [taken] = await _held_up(db, _refs(claim_these(gated, [ref])), lose_once)
    assert taken.id == ref.id
    assert (await run_row(db, ref))["attempt"] == 2
    assert [row["attempt"] for row in await attempt_rows(db, ref)] == [1]


@CHANGES
async def test_the_reaper_leaves_a_lease_that_was_saved_in_the_gap(
    db: Connection, gated: Connection, change: Change
) -> None:
    ref = await seed_run(db)
    lease = (await claim_one(db)).lease
    await leases.reap(gated, behind=LEFT_END, limit=99, longest=TTL)
    await expire(db, ref)
    before: list[dict[str, object]] = []

    async def change_it() -> None:
        await change(db, lease)
        before.extend(await attempt_rows(db, ref))

    freed = await _held_up(db, _freed(gated), change_it)
    assert freed == []
    assert await attempt_rows(db, ref) == before


async def _freed(conn: Connection) -> list[RunRef]:
    return (await leases.reap(conn, behind=LEFT_END, limit=99, longest=TTL)).freed
