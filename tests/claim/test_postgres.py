"""The claim strategy on PostgreSQL, on what both strategies stand on.

An idle claim here polls once an hour: what a test gets, it got for a better reason.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from app.claim import due
from app.claim.due import DueClaims
from app.claim.grant import Grants
from app.claim.load import TenantLoad
from app.claim.postgres import Pace, PostgresClaims
from app.domain.ids import RunId, TenantId
from app.domain.run import ClaimedRun, RunRef
from app.errors import StoreUnavailable
from app.store import claims, leases
from app.store.claims import Share
from app.store.pool import PLAN_GUARDS, Connection, Pool, close_pool, create_pool
from tests.eventually import eventually
from tests.factories_runs import (
    SECOND,
    TTL,
    attempt_rows,
    expire,
    run_row,
    seed_backlog,
    seed_run,
    seed_runs,
    seed_schedule,
    set_run,
    tenant_number,
)
from tests.tcp_proxy import tcp_proxy

pytestmark = pytest.mark.timeout(60)  # a claim that falls back to its poll hangs for an hour

HOURLY = Pace(poll=timedelta(hours=1))


class Clock:
    """Stands in for CLOCK_BOOTTIME in the strategy; moves only when told."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    frozen = Clock()
    monkeypatch.setattr(due, "boottime", frozen)
    return frozen


@dataclass(slots=True)
class Spy:
    """What the strategy asked the store for, in order."""

    asked: list[str] = field(default_factory=list)
    shares: list[Sequence[Share]] = field(default_factory=list)

    def count(self, what: str) -> int:
        return self.asked.count(what)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    noted = Spy()

    def watch(name: str) -> None:
        real: Callable[..., Any] = getattr(claims, name)

        async def wrapper(*args: Any, **named: Any) -> Any:
            noted.asked.append(name)
            if name == "claim_ring":
                noted.shares.append(named["shares"])
            return await real(*args, **named)

        monkeypatch.setattr(claims, name, wrapper)

    for name in ("claim_due", "claim_ring", "due_tenants", "next_due_in", "release_by_token"):
        watch(name)
    return noted


@dataclass(frozen=True, slots=True)
class Rig:
    """The strategy, what it stands on, and the load it must heed."""

    claims: PostgresClaims
    due: DueClaims
    load: TenantLoad


def _rig(pool: Pool, *, slots: int = 100, cap: int = 50, pace: Pace = HOURLY, replica: str = "one") -> Rig:
    load = TenantLoad(slots=slots, cap=cap)
    due_claims = DueClaims(pool, Grants(replica, TTL), load, rng=random.Random(7))
    return Rig(PostgresClaims(due_claims, load, pace=pace), due_claims, load)


def _take(load: TenantLoad, runs: Sequence[ClaimedRun]) -> list[TenantId]:
    tenants = [run.lease.ref.tenant_id for run in runs]
    for tenant in tenants:
        load.take(tenant)
        assert load.room(tenant) >= 0, "a tenant has more than its cap"
    return tenants


def _refs(runs: Sequence[ClaimedRun]) -> list[RunRef]:
    return [run.lease.ref for run in runs]


async def test_claims_are_oldest_first_and_never_larger_than_asked(db: Connection, claim_pool: Pool) -> None:
    rig = _rig(claim_pool)
    refs = await seed_runs(db, await seed_schedule(db), 5, due_ago=9 * SECOND, apart=SECOND)
    assert _refs(await rig.claims.claim(3)) == refs[:3]
    assert await rig.claims.claim(0) == []
    assert await rig.claims.claim(-1) == []
    assert sorted(_refs(await rig.claims.claim(99)), key=lambda ref: ref.fire_after) == refs[3:]


async def test_a_short_claim_asks_nobody_who_is_due(db: Connection, claim_pool: Pool, spy: Spy) -> None:
    rig = _rig(claim_pool)
    for _ in range(3):
        await seed_runs(db, await seed_schedule(db), 2)
        assert len(await rig.claims.claim(10)) == 2
    assert spy.asked == ["claim_due"] * 3


async def test_a_full_claim_leads_into_the_ring_and_an_empty_ring_leads_back(
    db: Connection, claim_pool: Pool, spy: Spy, clock: Clock
) -> None:
    rig = _rig(claim_pool)
    for _ in range(4):
        await seed_runs(db, await seed_schedule(db), 5, due_ago=9 * SECOND)
    taken = [run for _ in range(4) for run in await rig.claims.claim(6)]
    assert len(taken) == 20
    assert spy.asked == ["claim_due", "due_tenants", "due_tenants", *["claim_ring"] * 3]
    spy.asked.clear()
    late = await seed_run(db)
    assert _refs(await rig.claims.claim(6)) == [late]
    assert spy.asked[-1] == "claim_due"


async def test_the_last_light_tenant_is_claimed_within_one_round_of_the_tenants(
    db: Connection, claim_pool: Pool, spy: Spy
) -> None:
    """One tenant with 50,000 runs, 999 with one each, all due at one instant."""
    heavy = tenant_number(5_000)
    [month] = [await db.fetchval("SELECT date_trunc('second', now())")]
    await seed_backlog(db, 50_000, tenants=1, months=[month])
    await db.execute("UPDATE job_run SET tenant_id = $1", heavy)
    await seed_backlog(db, 999, tenants=999, months=[month + timedelta(hours=1)])
    rig = _rig(claim_pool, slots=100, cap=50)
    order: list[TenantId] = []
    waiting = {tenant_number(number) for number in range(1, 1000)}
    while waiting:
        tenants = _take(rig.load, await rig.claims.claim(min(100, rig.load.idle)))
        order += tenants
        waiting -= set(tenants)
        for tenant in tenants:
            rig.load.give(tenant)
    assert Counter(order)[heavy] < 300
    assert (
        len(order) <= 50 + 1_000 + 2 * 100
    )  # the claim before the ring, one round, and the claims cut by its ends
    assert spy.count("next_due_in") == 0


async def test_no_tenant_ever_has_more_than_its_cap(db: Connection, claim_pool: Pool) -> None:
    """Checked at every take, oldest first and in turns, with runs that end in any order."""
    rng = random.Random(11)
    for size in (40, 25, 10, 3, 1, 1):
        await seed_runs(db, await seed_schedule(db), size)
    rig = _rig(claim_pool, slots=12, cap=5)
    flying: list[TenantId] = []
    taken = 0
    while taken < 80:
        if rig.load.idle:
            claiming = asyncio.create_task(rig.claims.claim(rig.load.idle))
            while not claiming.done():
                if flying and rng.random() < 0.1:
                    rig.load.give(flying.pop(rng.randrange(len(flying))))
                await asyncio.sleep(0)
            runs = await claiming
            taken += len(runs)
            assert len(runs) <= rig.load.idle
            flying += _take(rig.load, runs)
        else:
            rig.load.give(flying.pop(rng.randrange(len(flying))))
    assert await db.fetchval("SELECT count(*) FROM job_run WHERE claimed_by IS NULL") == 0


async def test_a_lone_tenant_at_its_cap_goes_on_whenever_one_of_its_runs_ends(
    db: Connection, claim_pool: Pool, spy: Spy
) -> None:
    """Slots are free all the time, the tenant has no room: its own runs' ends wake the claim, not the poll."""
    await seed_runs(db, await seed_schedule(db), 120)
    rig = _rig(claim_pool, slots=40, cap=4)
    flying: list[TenantId] = []
    taken = turns = 0

    async def end_some() -> None:
        while taken < 120:
            await asyncio.sleep(0)
            while flying:
                rig.load.give(flying.pop())

    ending = asyncio.create_task(end_some())
    while taken < 120:
        runs = await asyncio.wait_for(rig.claims.claim(rig.load.idle), timeout=60)
        taken += len(runs)
        turns += 1
        flying += _take(rig.load, runs)
    await ending
    assert turns <= 2 * 120
    assert spy.count("next_due_in") <= turns


async def test_tenants_emptied_by_another_replica_cost_statements_but_no_pause(
    db: Connection, claim_pool: Pool, spy: Spy, clock: Clock
) -> None:
    tenants = sorted(TenantId(uuid4()) for _ in range(60))
    for tenant in tenants:
        await seed_runs(db, await seed_schedule(db, tenant=tenant), 2)
    rig = _rig(claim_pool)
    await rig.claims.claim(5)
    first = await rig.claims.claim(5)
    [asked] = spy.shares
    last = max(range(60), key=lambda place: (place - tenants.index(asked[0].tenant_id)) % 60)
    await db.execute(
        "UPDATE job_run SET status = 'succeeded', claimed_by = NULL, claim_expires_at = NULL,"
        " finished_at = now() WHERE tenant_id <> $1",
        tenants[last],
    )
    runs = await asyncio.wait_for(rig.claims.claim(5), timeout=60)
    assert {run.lease.ref.tenant_id for run in runs} == {tenants[last]}
    assert len(first) == 5
    assert spy.count("next_due_in") == 0


async def test_more_tenants_than_one_look_finds_are_found_by_the_following_ones(
    db: Connection, claim_pool: Pool, spy: Spy, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "RING_PAGE", 4)
    tenants = [TenantId(uuid4()) for _ in range(19)]
    for tenant in tenants:
        await seed_runs(db, await seed_schedule(db, tenant=tenant), 10)
    rig = _rig(claim_pool, cap=1_000, slots=1_000)
    await rig.claims.claim(1)
    for _ in range(2 + 19 // 4):
        clock.now += due.DISCOVER_EVERY
        await rig.claims.claim(1)
    shares = rig.due._ring.deal(1_000, rig.load)
    assert {share.tenant_id for share in shares} == set(tenants)


async def test_a_tenant_that_becomes_due_during_the_backlog_of_another_has_its_turn(
    db: Connection, claim_pool: Pool, clock: Clock
) -> None:
    await seed_runs(db, await seed_schedule(db), 300, due_ago=60 * SECOND)
    rig = _rig(claim_pool)
    for _ in range(3):
        assert len(await rig.claims.claim(10)) == 10
    late = await seed_run(db)
    clock.now += due.DISCOVER_EVERY
    assert late in _refs(await rig.claims.claim(10))


async def test_a_run_that_becomes_due_now_does_not_wait_for_the_next_walk(
    db: Connection, claim_pool: Pool, clock: Clock
) -> None:
    await seed_runs(db, await seed_schedule(db), 300, due_ago=60 * SECOND)
    rig = _rig(claim_pool)
    for _ in range(3):
        assert len(await rig.claims.claim(10)) == 10
    fresh = await _due_from_now(db, 3)
    clock.now += 2 * due.FRESH_EVERY
    assert fresh <= {ref.id for ref in _refs(await rig.claims.claim(10))}


async def test_more_newly_due_runs_than_one_look_takes_are_left_to_a_walk_at_once(
    db: Connection, claim_pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "FRESH_AT_MOST", 2)
    await seed_runs(db, await seed_schedule(db), 300, due_ago=60 * SECOND)
    rig = _rig(claim_pool)
    for _ in range(3):
        assert len(await rig.claims.claim(10)) == 10
    fresh = await _due_from_now(db, 5)
    claimed: set[RunId] = set()
    for _ in range(2):
        clock.now += 2 * due.FRESH_EVERY
        claimed |= {ref.id for ref in _refs(await rig.claims.claim(10))}
    assert fresh <= claimed


async def _due_from_now(db: Connection, amount: int) -> set[RunId]:
    """Runs of as many tenants that became due this moment."""
    refs = [await seed_run(db) for _ in range(amount)]
    now: datetime = await db.fetchval("SELECT clock_timestamp()")
    for ref in refs:
        await set_run(db, ref, fire_after=now)
    return {ref.id for ref in refs}


async def test_what_lies_behind_the_cursor_is_found_by_the_next_sweep(
    db: Connection, claim_pool: Pool, spy: Spy, clock: Clock
) -> None:
    rig = _rig(claim_pool, pace=Pace(poll=timedelta()))
    refs = await seed_runs(db, await seed_schedule(db), 3, due_ago=9 * SECOND, apart=SECOND)
    first, *_ = await rig.claims.claim(10)
    await leases.release(db, [first.lease])
    clock.now += due.SWEEP_AT_LEAST - 0.01
    assert await rig.claims.claim(10) == []
    clock.now += 0.02
    assert _refs(await rig.claims.claim(10)) == refs[:1]


@pytest.mark.parametrize(
    ("cost", "pause"),
    [(0.01, 1.0), (0.1, 2.0), (0.5, 5.0), (4.0, 5.0)],
    ids=["at least a second", "20 times its cost", "at most 5 s", "a stalled database"],
)
async def test_sweeps_are_paced_by_what_they_cost(
    db: Connection, claim_pool: Pool, clock: Clock, monkeypatch: pytest.MonkeyPatch, cost: float, pause: float
) -> None:
    real = claims.claim_due
    swept: list[float] = []

    async def costly(*args: Any, **named: Any) -> list[ClaimedRun]:
        clock.now += cost
        if named["behind"] == claims.LEFT_END:
            swept.append(clock.now)
        return await real(*args, **named)

    monkeypatch.setattr(claims, "claim_due", costly)
    rig = _rig(claim_pool, pace=Pace(poll=timedelta()))
    await seed_runs(db, await seed_schedule(db), 3)
    assert len(await rig.claims.claim(10)) == 3
    while len(swept) < 4:
        await rig.claims.claim(10)
    for one, following in pairwise(swept):
        # The pause, and up to three claims: the one under way at its end, its own, and one more for an idle claim.
        assert pause <= following - one <= pause + 3 * cost + 0.001


async def test_a_claim_waits_for_the_next_planned_run_and_takes_it(
    db: Connection, claim_pool: Pool, spy: Spy
) -> None:
    rig = _rig(claim_pool)
    ref = await seed_run(db, due_ago=-2 * SECOND)
    runs = await asyncio.wait_for(rig.claims.claim(5), timeout=60)
    assert _refs(runs) == [ref]
    assert spy.asked == ["claim_due", "next_due_in", "claim_due"]


async def test_leave_ends_the_wait_and_every_claim_after_it(
    db: Connection, claim_pool: Pool, spy: Spy
) -> None:
    rig = _rig(claim_pool)
    waiting = asyncio.create_task(rig.claims.claim(5))
    await eventually(lambda: spy.count("next_due_in"))
    await rig.claims.leave()
    assert await waiting == []
    await seed_run(db)
    assert await rig.claims.claim(5) == []
    await rig.claims.close()


async def test_announcing_and_opening_need_nothing(claim_pool: Pool) -> None:
    rig = _rig(claim_pool)
    await rig.claims.open()
    await rig.claims.announce([])


@dataclass(slots=True)
class Held:
    """Keeps a claim statement that has been executed from returning."""

    executed: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    real = claims.claim_due
    keeper = Held()

    async def late(*args: Any, **named: Any) -> list[ClaimedRun]:
        runs = await real(*args, **named)
        keeper.executed.set()
        await keeper.go_on.wait()
        return runs

    monkeypatch.setattr(claims, "claim_due", late)
    return keeper


async def _cancelled_in_the_middle(strategy: PostgresClaims, held: Held) -> None:
    claiming = asyncio.create_task(strategy.claim(5))
    await held.executed.wait()
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming


async def test_what_a_cancelled_claim_leased_is_given_back_by_the_next_one(
    db: Connection, claim_pool: Pool, held: Held
) -> None:
    rig = _rig(claim_pool, pace=Pace(poll=timedelta()))
    ref = await seed_run(db)
    await _cancelled_in_the_middle(rig.claims, held)
    held.go_on.set()
    await rig.due.idle()
    rig.due._sweep_at = 0.0
    [run] = await rig.claims.claim(5)
    assert (run.lease.ref, run.lease.attempt) == (ref, 1)
    assert await attempt_rows(db, ref) == []


async def test_what_a_cancelled_claim_leased_is_given_back_at_the_end(
    db: Connection, claim_pool: Pool, held: Held
) -> None:
    rig = _rig(claim_pool)
    ref = await seed_run(db)
    await _cancelled_in_the_middle(rig.claims, held)
    leaving = asyncio.create_task(rig.claims.leave())
    held.go_on.set()
    await leaving
    assert (await run_row(db, ref))["claimed_by"] is not None
    await rig.claims.close()
    row = await run_row(db, ref)
    assert (row["claimed_by"], row["attempt"], row["status"]) == (None, 0, "pending")


async def test_a_claim_whose_answer_was_lost_is_given_back_before_the_next_one(
    dsn: str, db: Connection, spy: Spy
) -> None:
    async with tcp_proxy(dsn) as (proxy, address):
        pool = await create_pool(address, size=2, application_name="behind a proxy", settings=PLAN_GUARDS)
        try:
            rig = _rig(pool, pace=Pace(poll=timedelta()))
            assert await rig.claims.claim(5) == []  # the statements are prepared
            refs = await seed_runs(db, await seed_schedule(db), 3)
            rig.due._sweep_at = 0.0
            spy.asked.clear()
            proxy.losing.set()
            with pytest.raises(StoreUnavailable):
                await rig.claims.claim(5)
            await eventually(lambda: _all_leased(db, refs))
            runs = await rig.claims.claim(5)
        finally:
            await close_pool(pool)
    assert spy.asked == ["claim_due", "release_by_token", "claim_due"]
    assert sorted(_refs(runs), key=lambda ref: ref.id) == sorted(refs, key=lambda ref: ref.id)
    assert {run.lease.attempt for run in runs} == {1}
    assert await db.fetchval("SELECT count(*) FROM run_attempt") == 0


async def _all_leased(conn: Connection, refs: Sequence[RunRef]) -> bool:
    leased: int = await conn.fetchval("SELECT count(*) FROM job_run WHERE claimed_by IS NOT NULL")
    return leased == len(refs)


async def test_nothing_is_claimed_until_the_unknown_claim_is_resolved(
    db: Connection, claim_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await seed_run(db)
    rig = _rig(claim_pool, pace=Pace(poll=timedelta()))
    failing = [True, True, False]
    real_claim, real_release = claims.claim_due, claims.release_by_token

    async def claim_and_lose(*args: Any, **named: Any) -> list[ClaimedRun]:
        runs = await real_claim(*args, **named)
        if failing.pop(0):
            raise StoreUnavailable("the answer was lost")
        return runs

    async def release(*args: Any, **named: Any) -> int:
        if failing.pop(0):
            raise StoreUnavailable("away")
        return await real_release(*args, **named)

    monkeypatch.setattr(claims, "claim_due", claim_and_lose)
    monkeypatch.setattr(claims, "release_by_token", release)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await rig.claims.claim(5)
        assert (await run_row(db, ref))["attempt"] == 1
    failing.append(False)
    [run] = await rig.claims.claim(5)
    assert (run.lease.ref, run.lease.attempt) == (ref, 1)


async def test_a_claim_that_never_reached_the_database_has_nothing_to_give_back(
    dsn: str, db: Connection, spy: Spy
) -> None:
    async with tcp_proxy(dsn) as (proxy, address):
        pool = await create_pool(address, size=2, application_name="behind a proxy", settings=PLAN_GUARDS)
        try:
            rig = _rig(pool, pace=Pace(poll=timedelta()))
            proxy.go_away()
            with pytest.raises(StoreUnavailable):
                await rig.claims.claim(5)
            proxy.come_back()
            ref = await seed_run(db)
            [run] = await rig.claims.claim(5)
        finally:
            await close_pool(pool)
    assert run.lease.ref == ref


async def test_expired_leases_are_recovered_by_claims_oldest_first_and_in_turns(
    db: Connection, claim_pool: Pool
) -> None:
    for _ in range(3):
        await seed_runs(db, await seed_schedule(db), 4)
    dead = _rig(claim_pool, replica="dead")
    while await dead.claims.claim(5):
        if await db.fetchval("SELECT count(*) FROM job_run WHERE claimed_by IS NULL") == 0:
            break
    await expire(db)
    alive = _rig(claim_pool, replica="alive")
    taken: list[ClaimedRun] = []
    while len(taken) < 12:
        taken += await alive.claims.claim(5)
    assert {run.lease.attempt for run in taken} == {2}
    assert await db.fetchval("SELECT count(*) FROM run_attempt WHERE outcome = 'lease_lost'") == 12
