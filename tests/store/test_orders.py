from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from app.domain.ids import ScheduleId, TenantId
from app.domain.retry import RetryPolicy
from app.domain.run import Complete, Settled
from app.domain.target import Target
from app.store import claims, orders, settlements
from app.store.pool import Connection
from tests.factories_runs import (
    SECOND,
    TARGET,
    SeededSchedule,
    claim,
    claim_one,
    evidence,
    grant,
    seed_run,
    seed_runs,
    seed_schedule,
)


async def test_an_order_is_the_current_version_of_its_schedule(db: Connection) -> None:
    target = Target("PUT", "https://example.com/x", (("A", "b"), ("A", "c")), "grüße")
    retry = RetryPolicy(3, timedelta(seconds=2), 1.5, timedelta(minutes=1))
    schedule = await seed_schedule(db, target=target, retry=retry, overlap="skip")
    await db.execute("UPDATE schedule SET version = 4 WHERE id = $1", schedule.id)
    [order] = await orders.read_orders(db, {schedule.id})
    assert order == orders.Order(schedule.id, 4, "seeded", target, retry, skips_overlap=True)


async def test_unknown_schedules_are_left_out(db: Connection) -> None:
    known = await seed_schedule(db)
    unknown = ScheduleId(uuid4())
    found = await orders.read_orders(db, {known.id, unknown})
    assert [order.schedule_id for order in found] == [known.id]
    assert await orders.read_orders(db, set()) == []


UNREADABLE = ["{}", "[]", "null", '"text"', "7", '{"method": "GET", "url": "u", "headers": 7, "body": null}']


@pytest.mark.parametrize("target", UNREADABLE)
async def test_a_target_that_cannot_be_read_spoils_no_other_order(db: Connection, target: str) -> None:
    bad = await seed_schedule(db, target=target)
    good = await seed_schedule(db)
    found = {order.schedule_id: order for order in await orders.read_orders(db, {bad.id, good.id})}
    assert found[bad.id].target is None
    assert found[bad.id].problem is not None
    assert (found[good.id].target, found[good.id].problem) == (TARGET, None)


@pytest.mark.parametrize(
    "retry",
    [
        "{}",
        "[]",
        "null",
        '{"max_attempts": "x", "base_seconds": 1, "factor": 1, "cap_seconds": 1}',
        '{"max_attempts": 3, "base_seconds": 1e300, "factor": 1, "cap_seconds": 1}',
        '{"max_attempts": 3, "base_seconds": 1e308, "factor": 1, "cap_seconds": null}',
    ],
)
async def test_a_retry_policy_that_cannot_be_read_is_a_problem_of_its_order(
    db: Connection, retry: str
) -> None:
    bad = await seed_schedule(db)
    await db.execute("UPDATE schedule SET retry = $2::jsonb WHERE id = $1", bad.id, retry)
    [order] = await orders.read_orders(db, {bad.id})
    assert order.problem is not None
    assert order.target is None


async def test_a_run_overlaps_when_an_earlier_run_of_its_schedule_has_not_ended(db: Connection) -> None:
    schedule = await seed_schedule(db)
    await seed_runs(db, schedule, 3, due_ago=9 * SECOND, apart=SECOND)
    first, second, third = await claim(db)
    assert await orders.overlapping(db, [third, first, second]) == {second.lease.ref.id, third.lease.ref.id}
    await settlements.complete(db, [Settled(first.lease, Complete(), evidence())])
    assert await orders.overlapping(db, [second, third]) == {third.lease.ref.id}
    await settlements.complete(db, [Settled(second.lease, Complete(), evidence())])
    assert await orders.overlapping(db, [third]) == set()


async def test_runs_of_other_schedules_and_later_runs_do_not_overlap(db: Connection) -> None:
    mine = await seed_schedule(db)
    neighbour = await seed_schedule(db, tenant=mine.tenant_id)
    await seed_runs(db, neighbour, 2, due_ago=99 * SECOND)
    ref = await seed_run(db, mine, due_ago=9 * SECOND)
    await seed_run(db, mine, due_ago=-60 * SECOND)
    [run] = [run for run in await claim(db) if run.lease.ref == ref]
    assert await orders.overlapping(db, [run]) == set()


async def test_an_earlier_run_that_waits_for_its_retry_or_is_not_claimed_yet_overlaps(db: Connection) -> None:
    for how in ({"attempt": 2, "due_ago": -60 * SECOND}, {"due_ago": -60 * SECOND}):
        schedule = await seed_schedule(db)
        await seed_run(db, schedule, **how)
        later = await seed_run(db, schedule, due_ago=9 * SECOND)
        run = await claim_one(db)
        assert run.lease.ref == later
        assert await orders.overlapping(db, [run]) == {later.id}


async def test_overlaps_of_many_tenants_are_told_in_one_question(db: Connection) -> None:
    schedules: list[SeededSchedule] = []
    for _ in range(3):
        tenant = TenantId(uuid4())
        schedules += [await seed_schedule(db, tenant=tenant) for _ in range(2)]
    expected = set()
    for place, schedule in enumerate(schedules):
        refs = await seed_runs(db, schedule, 1 + place % 2, due_ago=9 * SECOND, apart=SECOND)
        expected |= {ref.id for ref in refs[1:]}
    runs = await claims.claim_due(db, grant(), limit=99)
    assert await orders.overlapping(db, runs) == expected
    assert await orders.overlapping(db, []) == set()
