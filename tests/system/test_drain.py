"""SIGTERM: what is in flight ends well, what cannot end is handed on with evidence, and the process goes with 0."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

import pytest

from app.local.answers import Hang, Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.eventually import eventually
from tests.system import evidence
from tests.system.replicas import Fleet, Replica, probe
from tests.system.seeding import seed_one_offs, soon

RUNS = 600
SLOTS = 40


async def test_sigterm_in_a_burst_repeats_and_loses_nothing(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/", Reply(delay=timedelta(milliseconds=300)))
    leaving, staying = await fleet.start("leaving", "staying", executor_slots=str(SLOTS))
    at = await soon(db, ahead=timedelta(seconds=3))
    await seed_one_offs(db, RUNS, url=f"{receiver.url}/slow", at=at, tenants=20)
    await receiver.wait_for(2 * SLOTS)
    await eventually(lambda: _leases_of(db, "leaving"))
    leaving.send(signal.SIGTERM)
    assert await leaving.ended() == 0
    assert await _leases_of(db, "leaving") == 0
    await evidence.all_ended(db, runs=RUNS)

    [begun] = leaving.events("drain.begun")
    assert begun["in_flight"] != 0, "there was something to finish"
    assert leaving.events("drain.abandoning") == []
    assert await evidence.statuses(db) == {"succeeded": RUNS}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(db)
    assert set(arrived.values()) == {1}
    found = await evidence.attempts(db)
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    assert {attempt.worker for attempt in found} == {"leaving", "staying"}
    assert staying.is_running


async def test_a_replica_of_any_one_role_stops_cleanly(fleet: Fleet) -> None:
    roles = ("api", "planner", "executor", "maintenance")
    replicas = [replica for role in roles for replica in await fleet.start(role, roles=role)]
    for replica in replicas:
        replica.send(signal.SIGTERM)
    assert [await replica.ended() for replica in replicas] == [0] * len(roles)
    assert [len(replica.events("drain.done")) for replica in replicas] == [1] * len(roles)


async def test_a_second_sigterm_abandons_what_was_sent_and_leaves_it_as_a_retry_with_evidence(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/", Hang())
    [replica] = await fleet.start("only", executor_slots="20", executor_delivery_timeout="10s")
    await seed_one_offs(db, 30, url=f"{receiver.url}/hang", at=await soon(db), tenants=10)
    await receiver.wait_for(20)
    replica.send(signal.SIGTERM)
    await replica.saw("drain.begun")
    async with probe() as client:
        assert (await client.get(f"{replica.url}/readyz")).status_code == 503
        assert (await client.get(f"{replica.url}/livez")).status_code == 200
    assert replica.is_running
    replica.send(signal.SIGTERM)
    assert await replica.ended() == 0

    found = await evidence.attempts(db)
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "abandoned")}, "not timed out"
    assert all(attempt.is_maybe_delivered for attempt in found)
    assert evidence.with_outcome(found, "abandoned") == set(evidence.arrivals(receiver.received))
    rows = await db.fetch(
        """SELECT status, attempt, claimed_by IS NULL, count(*) FROM job_run GROUP BY 1, 2, 3 ORDER BY 1"""
    )
    assert [tuple(row) for row in rows] == [("pending", 0, True, 10), ("retrying", 1, True, 20)]

    receiver.answer("/", Reply())
    await fleet.start("next")
    await evidence.all_ended(db, runs=30)
    assert await evidence.statuses(db) == {"succeeded": 30}
    assert evidence.same_number_twice(receiver.received) == set()


MOMENTS = 10


async def test_sigterm_at_any_moment_of_the_start_ends_the_process_cleanly(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/", Reply(delay=timedelta(milliseconds=100)))
    await seed_one_offs(db, 2_000, url=f"{receiver.url}/start", at=await soon(db), tenants=20)
    loop = asyncio.get_running_loop()
    began = loop.time()
    [first] = await fleet.start("measured")
    whole_start = loop.time() - began
    first.send(signal.SIGTERM)
    assert await first.ended() == 0
    for number in range(MOMENTS):
        replica = fleet.launch(f"moment-{number}")
        await asyncio.sleep(whole_start * number / (MOMENTS - 1))  # a moment, not a synchronisation
        replica.send(signal.SIGTERM)
        code = await replica.ended()
        _assert_clean(replica, code)
        assert await _leases_of(db, replica.name) == 0
    await eventually(lambda: _sessions(db))
    found = await evidence.attempts(db)
    assert {attempt.outcome for attempt in found} <= {"delivered"}
    assert set(evidence.arrivals(receiver.received).values()) <= {1}


def _assert_clean(replica: Replica, code: int) -> None:
    """Ended with 0; or by the signal itself, before the program had taken it over and had done anything."""
    if code == -signal.SIGTERM:
        assert replica.events() == []
    else:
        assert code == 0, replica.events()[-5:]
    assert replica.events("not json") == [], "nothing was printed past the log"


async def _leases_of(conn: Connection, replica: str) -> int:
    """How many leases this replica has left behind."""
    found: int = await conn.fetchval(
        "SELECT count(*) FROM job_run WHERE split_part(claimed_by, '/', 1) = $1", replica
    )
    return found


async def _sessions(conn: Connection) -> bool:
    """Whether every session of a replica has gone."""
    left: int = await conn.fetchval(
        """SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name LIKE 'carillon %'
              AND application_name NOT LIKE 'carillon tests%'"""
    )
    return left == 0


pytestmark = pytest.mark.timeout(240)
