from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from app.domain.admit import admit
from app.domain.ids import ScheduleId, TenantId, run_id
from app.domain.run import Cancel, ClaimedRun, Fail, Origin, Reason, RunRef, Settled
from app.store import claims, leases, settlements
from app.store.claims import LEFT_END, Cursor, Share
from app.store.leases import key_of
from app.store.pool import PLAN_GUARDS, Connection, close, connect
from tests.factories_runs import (
    SECOND,
    TTL,
    SeededSchedule,
    attempt_rows,
    claim,
    claim_one,
    everything,
    expire,
    grant,
    request_cancel,
    run_row,
    seed_run,
    seed_runs,
    seed_schedule,
    set_run,
)


@pytest.fixture(params=[{}, PLAN_GUARDS], ids=["plain", "guarded"])
async def claimer(dsn: str, request: pytest.FixtureRequest) -> AsyncIterator[Connection]:
    """A connection without and with the plan guards: they may change the speed, never the answer."""
    settings: Mapping[str, str] = request.param
    opened = await connect(dsn, application_name="carillon tests, claims", settings=settings)
    yield opened
    await close(opened)


ClaimThese = Callable[[Connection, list[RunRef]], Awaitable[list[ClaimedRun]]]


async def _due(conn: Connection, refs: list[RunRef]) -> list[ClaimedRun]:
    return await claims.claim_due(conn, grant(), limit=len(refs))


async def _ring(conn: Connection, refs: list[RunRef]) -> list[ClaimedRun]:
    tenants = {ref.tenant_id for ref in refs}
    return await claims.claim_ring(
        conn, grant(), shares=[Share(tenant, len(refs), LEFT_END) for tenant in tenants]
    )


async def _hinted(conn: Connection, refs: list[RunRef]) -> list[ClaimedRun]:
    return await claims.claim_hinted(conn, grant(), refs=refs)


each_claim = pytest.mark.parametrize("claim_these", [_due, _ring, _hinted], ids=["due", "ring", "hinted"])


async def _one_of_everything(conn: Connection) -> dict[str, RunRef]:
    """Runs that something is wrong with, oldest first, and a sound one behind them."""

    async def run_of(status: str, ago: int, **how: object) -> RunRef:
        schedule = await seed_schedule(conn, status=status)
        return await seed_run(conn, schedule, due_ago=ago * SECOND, **how)

    refs = {
        "spent": await run_of("active", 90, attempt=8, max_attempts=8),
        "spent early": await run_of("active", 80, attempt=3, max_attempts=3),
        "no schedule": await seed_run(
            conn, SeededSchedule(ScheduleId(uuid4()), TenantId(uuid4())), due_ago=70 * SECOND
        ),
        "paused": await run_of("paused", 60),
        "deleted": await run_of("deleted", 50),
        "error": await run_of("error", 40),
        "expired": await run_of("active", 30, expires_in=-SECOND),
        "cancelled": await run_of("active", 20),
        "sound": await run_of("active", 10),
    }
    await request_cancel(conn, refs["cancelled"])
    for name in ("spent", "spent early"):
        await set_run(conn, refs[name], claimed_by="dead/0/1", claim_expires_at=refs[name].fire_after)
    return refs


@each_claim
async def test_a_claim_takes_runs_that_may_not_be_sent_like_any_other(
    claimer: Connection, claim_these: ClaimThese
) -> None:
    refs = await _one_of_everything(claimer)
    runs = await claim_these(claimer, list(refs.values()))
    assert [run.lease.ref for run in runs] == list(refs.values())
    verdicts = dict(zip(refs, (admit(run) for run in runs), strict=True))
    assert verdicts == {
        "spent": Fail(Reason.ATTEMPTS_SPENT),
        "spent early": Fail(Reason.ATTEMPTS_SPENT),
        "no schedule": Cancel(Reason.SCHEDULE_DELETED),
        "paused": Cancel(Reason.SCHEDULE_PAUSED),
        "deleted": Cancel(Reason.SCHEDULE_DELETED),
        "error": Cancel(Reason.SCHEDULE_QUARANTINED),
        "expired": Fail(Reason.EXPIRED),
        "cancelled": Cancel(Reason.CANCELLED),
        "sound": None,
    }


@each_claim
async def test_taking_over_an_expired_lease_leaves_one_evidence_row_with_the_old_token(
    claimer: Connection, claim_these: ClaimThese
) -> None:
    ref = await seed_run(claimer)
    lost = (await claim_one(claimer, "one")).lease
    await expire(claimer, ref)
    [run] = await claim_these(claimer, [ref])
    assert run.lease.attempt == 2
    [row] = await attempt_rows(claimer, ref)
    assert (row["attempt"], row["outcome"], row["lease_token"], row["worker"], row["maybe_delivered"]) == (
        1,
        "lease_lost",
        lost.token,
        "one",
        True,
    )


@each_claim
async def test_a_run_with_spent_attempts_fails_under_its_new_lease_without_a_second_evidence_row(
    claimer: Connection, claim_these: ClaimThese
) -> None:
    ref = await seed_run(claimer, attempt=7, max_attempts=8)
    lost = (await claim_one(claimer)).lease
    assert lost.attempt == 8
    await expire(claimer, ref)
    [run] = await claim_these(claimer, [ref])
    assert run.is_exhausted
    verdict = admit(run)
    assert verdict == Fail(Reason.ATTEMPTS_SPENT)
    assert await settlements.fail(claimer, [Settled(run.lease, verdict, None)]) == {key_of(run.lease)}
    row = await run_row(claimer, ref)
    assert (row["status"], row["reason"], row["attempt"]) == ("failed", "attempts_spent", 8)
    assert [(r["attempt"], r["lease_token"]) for r in await attempt_rows(claimer, ref)] == [(8, lost.token)]


@pytest.mark.parametrize("most", [3, 8])
@pytest.mark.parametrize("way", ["release", "release_by_token"])
async def test_giving_back_a_run_with_spent_attempts_does_not_make_one_of_them_free_again(
    db: Connection, most: int, way: str
) -> None:
    ref = await seed_run(db, attempt=most - 1, max_attempts=most)
    await claim_one(db)
    await expire(db, ref)
    for _ in range(2):
        again = await claim_one(db)
        assert again.is_exhausted
        if way == "release":
            assert await leases.release(db, [again.lease])
        else:
            assert await claims.release_by_token(db, again.lease.token) == 1
        assert (await run_row(db, ref))["attempt"] == most


async def test_a_claim_counts_one_attempt_and_starts_the_lease_at_its_own_moment(claimer: Connection) -> None:
    ref = await seed_run(claimer)
    async with claimer.transaction():
        began = await claimer.fetchval("SELECT now()")
        await claimer.fetch("SELECT pg_sleep(0.02)")
        run = await claim_one(claimer, ttl=TTL)
        row = await run_row(claimer, ref)
    assert (row["attempt"], row["claimed_by"], row["status"]) == (1, run.lease.token, "pending")
    assert row["claim_expires_at"] - TTL > began + timedelta(milliseconds=20)  # type: ignore[operator]
    assert run.granted_at > began


async def test_neither_early_runs_nor_leased_ones_nor_ended_ones_are_claimed(claimer: Connection) -> None:
    schedule = await seed_schedule(claimer)
    refs = [await seed_run(claimer, schedule, due_ago=seconds * SECOND) for seconds in (9, 8, -60)]
    await claim(claimer, limit=1)
    await set_run(claimer, refs[1], status="succeeded", finished_at=refs[1].fire_after)
    before = await everything(claimer)
    assert await _due(claimer, refs) == []
    assert await _ring(claimer, refs) == []
    assert await _hinted(claimer, refs) == []
    assert await everything(claimer) == before


async def test_a_claim_returns_the_oldest_first_and_goes_on_behind_its_cursor(claimer: Connection) -> None:
    schedule = await seed_schedule(claimer)
    refs = await seed_runs(claimer, schedule, 5, due_ago=50 * SECOND, apart=SECOND)
    twins = await seed_runs(claimer, schedule, 4, due_ago=9 * SECOND)
    expected = refs + twins
    taken: list[RunRef] = []
    behind = LEFT_END
    while runs := await claims.claim_due(claimer, grant(), limit=2, behind=behind):
        taken += [run.lease.ref for run in runs]
        behind = Cursor(taken[-1].fire_after, taken[-1].id)
    assert taken == expected


async def test_what_lies_before_the_cursor_is_left_alone(claimer: Connection) -> None:
    schedule = await seed_schedule(claimer)
    old, new = await seed_runs(claimer, schedule, 2, due_ago=9 * SECOND, apart=SECOND)
    runs = await claims.claim_due(claimer, grant(), limit=9, behind=Cursor(old.fire_after, old.id))
    assert [run.lease.ref for run in runs] == [new]


async def test_a_claim_for_overdue_runs_leaves_the_fresh_ones(claimer: Connection) -> None:
    schedule = await seed_schedule(claimer)
    old = await seed_run(claimer, schedule, due_ago=60 * SECOND)
    await seed_run(claimer, schedule, due_ago=SECOND)
    grace = timedelta(seconds=30)
    assert (await claims.due_tenants(claimer, behind=UUID(int=0), limit=9, overdue_by=grace)).due == [
        schedule.tenant_id
    ]
    runs = await claims.claim_due(claimer, grant(), limit=9, overdue_by=grace)
    assert [run.lease.ref for run in runs] == [old]
    assert (await claims.due_tenants(claimer, behind=UUID(int=0), limit=9, overdue_by=grace)).due == []
    share = Share(schedule.tenant_id, 9, LEFT_END)
    assert await claims.claim_ring(claimer, grant(), shares=[share], overdue_by=grace) == []


async def test_a_ring_claim_gives_each_tenant_its_share_behind_its_own_cursor(claimer: Connection) -> None:
    many, few, none = [await seed_schedule(claimer) for _ in range(3)]
    refs = await seed_runs(claimer, many, 5, due_ago=50 * SECOND, apart=SECOND)
    [only] = await seed_runs(claimer, few, 1)
    shares = [
        Share(many.tenant_id, 2, Cursor(refs[0].fire_after, refs[0].id)),
        Share(few.tenant_id, 3, LEFT_END),
        Share(none.tenant_id, 4, LEFT_END),
    ]
    runs = await claims.claim_ring(claimer, grant(), shares=shares)
    assert [run.lease.ref for run in runs] == [refs[1], refs[2], only]


async def test_hints_that_are_doubled_or_unknown_or_point_to_another_instant_claim_nothing_extra(
    claimer: Connection,
) -> None:
    schedule = await seed_schedule(claimer)
    [ref] = await seed_runs(claimer, schedule, 1)
    elsewhere = replace(ref, scheduled_for=ref.scheduled_for + SECOND)
    unknown = replace(elsewhere, id=run_id(schedule.id, elsewhere.scheduled_for))
    runs = await claims.claim_hinted(claimer, grant(), refs=[ref, elsewhere, ref, unknown])
    assert [run.lease.ref for run in runs] == [ref]
    assert (await run_row(claimer, ref))["attempt"] == 1
    assert await claims.claim_hinted(claimer, grant(), refs=[]) == []


async def test_a_hint_that_names_another_tenant_claims_nothing(claimer: Connection) -> None:
    ref = await seed_run(claimer)
    foreign = replace(ref, tenant_id=TenantId(uuid4()))
    assert await claims.claim_hinted(claimer, grant(), refs=[foreign]) == []
    [run] = await claims.claim_hinted(claimer, grant(), refs=[foreign, ref])
    assert run.lease.ref == ref


async def test_a_row_that_somebody_holds_is_skipped_and_the_limit_still_filled(
    claimer: Connection, db: Connection
) -> None:
    refs = await seed_runs(claimer, await seed_schedule(claimer), 3, due_ago=9 * SECOND, apart=SECOND)
    async with db.transaction():
        await db.execute("SELECT FROM job_run WHERE id = $1 FOR UPDATE", refs[0].id)
        runs = await claim(claimer, limit=2)
    assert [run.lease.ref for run in runs] == refs[1:]


async def test_two_claimers_never_take_the_same_run(dsn: str, db: Connection) -> None:
    schedules = [await seed_schedule(db) for _ in range(20)]
    expected = {ref.id for schedule in schedules for ref in await seed_runs(db, schedule, 50)}
    taken: list[UUID] = []

    async def take_by(replica: str, claim_some: Callable[[Connection], Awaitable[list[ClaimedRun]]]) -> None:
        conn = await connect(dsn, application_name=replica)
        try:
            while runs := await claim_some(conn):
                taken.extend(run.lease.ref.id for run in runs)
        finally:
            await close(conn)

    async def oldest(conn: Connection) -> list[ClaimedRun]:
        return await claims.claim_due(conn, grant("oldest"), limit=7)

    async def in_turns(conn: Connection) -> list[ClaimedRun]:
        shares = [Share(schedule.tenant_id, 1, LEFT_END) for schedule in schedules]
        return await claims.claim_ring(conn, grant("in turns"), shares=shares)

    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(take_by(f"oldest {number}", oldest))
            group.create_task(take_by(f"in turns {number}", in_turns))
    assert len(taken) == len(set(taken))
    assert set(taken) == expected
    assert await db.fetchval("SELECT max(attempt) FROM job_run") == 1


async def test_due_tenants_are_found_page_by_page_and_only_those_with_something_to_claim(
    claimer: Connection,
) -> None:
    tenants = sorted(TenantId(uuid4()) for _ in range(5))
    for tenant in tenants:
        await seed_runs(claimer, await seed_schedule(claimer, tenant=tenant), 3)
    await seed_runs(claimer, await seed_schedule(claimer), 3, due_ago=-60 * SECOND)
    await claims.claim_ring(claimer, grant(), shares=[Share(tenants[2], 9, LEFT_END)])
    found: list[TenantId] = []
    behind: UUID | None = UUID(int=0)
    pages = 0
    while behind is not None:
        page = await claims.due_tenants(claimer, behind=behind, limit=2)
        assert len(page.due) <= 2
        found += page.due
        behind = page.last
        pages += 1
    assert sorted(found) == [tenants[0], tenants[1], tenants[3], tenants[4]]
    assert pages == 4  # three full ones, and one that finds the end


async def test_the_next_due_run_is_the_first_one_that_is_not_due_yet(claimer: Connection) -> None:
    assert await claims.next_due_in(claimer) is None
    schedule = await seed_schedule(claimer)
    await seed_runs(claimer, schedule, 2, due_ago=9 * SECOND)
    assert await claims.next_due_in(claimer) is None
    await seed_runs(claimer, schedule, 2, due_ago=timedelta(hours=-2), apart=SECOND)
    wait = await claims.next_due_in(claimer)
    assert wait is not None
    assert timedelta(hours=1) < wait <= timedelta(hours=2)


async def test_release_by_token_gives_back_one_claim_with_its_attempts_and_nothing_else(
    claimer: Connection,
) -> None:
    refs = await seed_runs(claimer, await seed_schedule(claimer), 4, due_ago=9 * SECOND, apart=SECOND)
    await claim(claimer, limit=2)
    other = await claim(claimer, limit=2)
    await settlements.fail(claimer, [Settled(other[0].lease, Fail(Reason.EXPIRED), None)])
    assert await claims.release_by_token(claimer, other[0].lease.token) == 1
    rows = [await run_row(claimer, ref) for ref in refs]
    assert [(row["status"], row["attempt"], row["claimed_by"] is None) for row in rows] == [
        ("pending", 1, False),
        ("pending", 1, False),
        ("failed", 0, True),
        ("pending", 0, True),
    ]
    assert await claims.release_by_token(claimer, "nobody/0/1") == 0


async def test_a_claim_tells_everything_that_admission_and_delivery_need(claimer: Connection) -> None:
    schedule = await seed_schedule(claimer)
    ref = await seed_run(claimer, schedule, max_attempts=4)
    terms = grant()
    [run] = await claims.claim_due(claimer, terms, limit=1)
    assert run.lease.ref == ref
    assert run.lease.token == terms.token
    assert (run.schedule_id, run.schedule_version, run.schedule_status) == (schedule.id, 1, "active")
    assert (str(run.delivery_id), run.origin, run.max_attempts) == (str(ref.id), Origin.SCHEDULE, 4)
    assert run.asked_at == terms.asked_at <= run.answered_at
