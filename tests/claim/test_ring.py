from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from uuid import UUID, uuid4

from hypothesis import given
from hypothesis import strategies as st

from app.claim.load import TenantLoad
from app.claim.ring import TenantRing
from app.domain.ids import EPOCH, DeliveryId, RunId, ScheduleId, TenantId
from app.domain.run import ClaimedRun, Lease, Origin, RunRef
from app.store.claims import LEFT_END, Cursor, Share


def _ring(amount: int) -> tuple[TenantRing, list[TenantId]]:
    ring = TenantRing(random.Random(1))
    tenants = [TenantId(UUID(int=number)) for number in range(1, amount + 1)]
    ring.join(tenants)
    return ring, tenants


def _load(slots: int = 100, cap: int = 50) -> TenantLoad:
    return TenantLoad(slots=slots, cap=cap)


def _run(tenant: TenantId, place: int) -> ClaimedRun:
    at = EPOCH + timedelta(seconds=place)
    return ClaimedRun(
        lease=Lease(RunRef(RunId(uuid4()), tenant, at, at), "a/b/1", 1),
        schedule_id=ScheduleId(uuid4()),
        schedule_version=1,
        schedule_status="active",
        origin=Origin.SCHEDULE,
        delivery_id=DeliveryId(uuid4()),
        max_attempts=5,
        granted_at=EPOCH,
        asked_at=0.0,
        answered_at=0.0,
        is_exhausted=False,
        is_expired=False,
        is_cancel_requested=False,
    )


def _serve(ring: TenantRing, shares: list[Share], backlog: Counter[TenantId]) -> list[ClaimedRun]:
    """What a claim of these shares returns while the tenants have so many runs left."""
    runs: list[ClaimedRun] = []
    for share in shares:
        amount = min(share.limit, backlog[share.tenant_id])
        runs += [_run(share.tenant_id, place) for place in range(amount)]
        backlog[share.tenant_id] -= amount
    ring.served(shares, runs)
    return runs


def test_with_more_tenants_than_slots_each_gets_one_in_turn_then_two_then_four() -> None:
    ring, tenants = _ring(200)
    backlog = Counter(dict.fromkeys(tenants, 99))
    for quantum in (1, 2, 4, 4):
        asked: list[TenantId] = []
        while len(asked) < len(tenants):
            shares = ring.deal(100, _load())
            assert {share.limit for share in shares} == {quantum}
            asked += [share.tenant_id for share in shares]
            _serve(ring, shares, backlog)
        assert asked == tenants


def test_who_has_just_become_due_comes_first_and_keeps_no_place_twice() -> None:
    ring, tenants = _ring(3)
    late = TenantId(UUID(int=99))
    ring.join_first([late, tenants[2]])
    assert [share.tenant_id for share in ring.deal(4, _load())] == [late, *tenants]


def test_with_fewer_tenants_than_slots_the_slots_are_spread_evenly() -> None:
    ring, _ = _ring(3)
    assert [share.limit for share in ring.deal(10, _load())] == [4, 4, 2]
    ring, _ = _ring(4)
    assert [share.limit for share in ring.deal(8, _load())] == [2, 2, 2, 2]


def test_a_tenant_at_its_cap_is_not_asked_and_keeps_its_turn() -> None:
    ring, tenants = _ring(3)
    load = _load(slots=10, cap=2)
    load.take(tenants[0])
    load.take(tenants[0])
    shares = ring.deal(8, load)
    assert [(share.tenant_id, share.limit) for share in shares] == [(tenants[1], 2), (tenants[2], 2)]
    _serve(ring, shares, Counter(dict.fromkeys(tenants, 9)))
    load.give(tenants[0])
    assert ring.deal(1, load)[0].tenant_id == tenants[0]


def test_nothing_is_dealt_when_everybody_is_at_the_cap() -> None:
    ring, tenants = _ring(2)
    load = _load(slots=2, cap=1)
    for tenant in tenants:
        load.take(tenant)
    assert ring.deal(5, load) == []
    assert len(ring) == 2


def test_a_tenant_that_returns_less_than_asked_leaves_and_may_join_again() -> None:
    ring, tenants = _ring(2)
    _serve(ring, ring.deal(4, _load()), Counter({tenants[0]: 2, tenants[1]: 1}))
    assert [share.tenant_id for share in ring.deal(4, _load())] == [tenants[0]]
    ring.join([tenants[1], tenants[0], tenants[1]])
    assert [share.tenant_id for share in ring.deal(4, _load())] == tenants


def test_each_tenant_goes_on_behind_its_own_last_run_until_the_sweep() -> None:
    ring, (one, two) = _ring(2)
    shares = ring.deal(4, _load())
    runs = [_run(one, 1), _run(one, 2), _run(two, 1), _run(two, 7)]
    ring.served(shares, runs)
    behind = {share.tenant_id: share.behind for share in ring.deal(4, _load())}
    last_of = {run.lease.ref.tenant_id: run.lease.ref for run in runs}
    assert behind == {tenant: Cursor(ref.fire_after, ref.id) for tenant, ref in last_of.items()}
    ring.rewind()
    assert {share.behind for share in ring.deal(4, _load())} == {LEFT_END}


def test_a_tenant_that_left_starts_at_its_left_end_when_it_joins_again() -> None:
    ring, [one] = _ring(1)
    ring.served(ring.deal(2, _load()), [_run(one, 5)])
    ring.join([one])
    assert ring.deal(2, _load())[0].behind == LEFT_END


@given(
    backlogs=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    limits=st.lists(st.integers(1, 25), min_size=1, max_size=60),
    cap=st.integers(1, 10),
    seed=st.integers(0, 2**16),
)
def test_whatever_comes_the_shares_fit_and_nobody_waits_longer_than_a_round(
    backlogs: list[int], limits: list[int], cap: int, seed: int
) -> None:
    rng = random.Random(seed)
    ring, tenants = _ring(len(backlogs))
    backlog = Counter(dict(zip(tenants, backlogs, strict=True)))
    load = TenantLoad(slots=10_000, cap=cap)
    flying: list[TenantId] = []
    passed_over: Counter[TenantId] = Counter()
    for limit in limits:
        shares = ring.deal(limit, load)
        assert sum(share.limit for share in shares) <= limit
        assert len({share.tenant_id for share in shares}) == len(shares)
        assert all(0 < share.limit <= load.room(share.tenant_id) for share in shares)
        could_be_asked = {tenant for tenant in tenants if backlog[tenant] and load.room(tenant)}
        for run in _serve(ring, shares, backlog):
            flying.append(run.lease.ref.tenant_id)
            load.take(flying[-1])
        asked = {share.tenant_id for share in shares}
        for tenant in tenants:
            passed_over[tenant] = passed_over[tenant] + len(asked) if tenant in could_be_asked - asked else 0
            # While it has room, the others are asked less than twice each before its turn comes.
            assert passed_over[tenant] < 2 * len(tenants)
        rng.shuffle(flying)
        for tenant in flying[: rng.randint(0, len(flying))]:
            load.give(tenant)
            flying.remove(tenant)
