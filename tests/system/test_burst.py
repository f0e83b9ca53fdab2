"""Two replicas and many runs due at one instant: exactly once each, and never more claimed than can be started."""

from __future__ import annotations

from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.system import evidence
from tests.system.replicas import Fleet
from tests.system.seeding import seed_one_offs, soon

RUNS = 10_000
TENANTS = 50
SLOTS = 60
BURST_WITHIN = timedelta(seconds=150)


async def test_ten_thousand_due_runs_are_each_delivered_exactly_once_by_two_replicas(
    fleet: Fleet, dsn: str, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/", Reply(delay=timedelta(milliseconds=20)))
    await fleet.start("one", "two", executor_slots=str(SLOTS))
    at = await soon(db, ahead=timedelta(seconds=5))
    await seed_one_offs(db, RUNS, url=f"{receiver.url}/burst", at=at, tenants=TENANTS)
    async with evidence.watched_leases(dsn) as most_leases:
        await receiver.wait_for(RUNS, timeout=BURST_WITHIN)
        await evidence.all_ended(db, runs=RUNS)

    assert await evidence.statuses(db) == {"succeeded": RUNS}
    found = await evidence.attempts(db)
    assert len(found) == RUNS
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived.values()) == {1}
    assert set(arrived) == await evidence.delivery_ids(db)
    assert await db.fetchval("SELECT count(*) FROM schedule WHERE status <> 'finished'") == 0

    busiest = await evidence.busiest(db)
    assert set(busiest) == {"one", "two"}, "both replicas took their part"
    assert max(busiest.values()) <= SLOTS
    assert set(most_leases) == {"one", "two"}
    assert max(most_leases.values()) <= SLOTS
