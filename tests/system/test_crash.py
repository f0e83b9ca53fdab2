"""A replica is killed, or frozen for longer than its leases, in the middle of a burst.

Every run ends, every second delivery has its evidence, and whoever wakes up too late changes nothing any more.
"""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.eventually import eventually
from tests.factories_runs import everything
from tests.system import evidence
from tests.system.replicas import Fleet, Replica, probe
from tests.system.seeding import seed_one_offs, soon

RUNS = 600
SLOTS = 40
ANSWER_AFTER = timedelta(milliseconds=300)


async def test_after_kill_9_every_run_ends_and_every_duplicate_has_its_evidence(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/", Reply(delay=ANSWER_AFTER))
    doomed, _ = await fleet.start("doomed", "survivor", executor_slots=str(SLOTS))
    await _burst(db, receiver)
    on_the_wire = await _hit(doomed, signal.SIGKILL, db, receiver)
    assert await doomed.ended() == -signal.SIGKILL
    await evidence.all_ended(db, runs=RUNS)

    await _judge(db, receiver, by="doomed", on_the_wire=on_the_wire)


async def test_a_frozen_replica_that_wakes_behind_its_leases_sends_nothing_and_writes_nothing(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    fleet.expect("loop.failed")  # a turn that was frozen with its statement
    receiver.answer("/", Reply(delay=ANSWER_AFTER))
    frozen, _ = await fleet.start("frozen", "survivor", executor_slots=str(SLOTS))
    await _burst(db, receiver)
    on_the_wire = await _hit(frozen, signal.SIGSTOP, db, receiver)
    await evidence.all_ended(db, runs=RUNS)
    before, arrived_before = await everything(db), len(receiver.received)

    frozen.send(signal.SIGCONT)
    await eventually(lambda: frozen.events("settle.lease_lost", "lease.lost"))
    async with probe() as client:

        async def is_done() -> bool:
            figures = (await client.get(f"{frozen.url}/metrics")).text
            return re.search(r"^scheduler_in_flight 0\.0$", figures, re.MULTILINE) is not None

        await eventually(is_done)
        assert (await client.get(f"{frozen.url}/livez")).is_success
    assert await everything(db) == before
    assert len(receiver.received) == arrived_before
    await _judge(db, receiver, by="frozen", on_the_wire=on_the_wire)


async def _burst(conn: Connection, receiver: Receiver) -> None:
    """All runs are due, and two rounds of them have arrived."""
    at = await soon(conn, ahead=timedelta(seconds=3))
    await seed_one_offs(conn, RUNS, url=f"{receiver.url}/slow", at=at, tenants=20)
    await receiver.wait_for(2 * SLOTS)


async def _hit(replica: Replica, number: signal.Signals, conn: Connection, receiver: Receiver) -> set[str]:
    """Send the signal while the replica has requests on the wire; their delivery ids."""

    async def attempt() -> set[str]:
        leased = await _leased_by(conn, replica.name)
        on_the_wire = leased & _unanswered(receiver)
        if on_the_wire:
            replica.send(number)
        return on_the_wire

    return await eventually(attempt)


async def _judge(conn: Connection, receiver: Receiver, *, by: str, on_the_wire: set[str]) -> None:
    assert await evidence.statuses(conn) == {"succeeded": RUNS}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(conn), "none is missing"
    found = await evidence.attempts(conn)
    lost = evidence.with_outcome(found, "lease_lost")
    assert len(lost) <= SLOTS
    assert on_the_wire <= evidence.repeated(receiver.received) <= lost
    assert max(arrived.values()) == 2
    assert evidence.same_number_twice(receiver.received) == set(), "the number of a lost attempt is spent"
    assert {attempt.worker for attempt in found if attempt.outcome == "lease_lost"} == {by}
    assert {attempt.worker for attempt in found if attempt.number == 2} == {"survivor"}
    assert len(found) == RUNS + len(lost)


def _unanswered(receiver: Receiver) -> set[str]:
    """Requests that arrived so lately that their answers cannot have left."""
    since = time.monotonic() - ANSWER_AFTER.total_seconds() / 2
    return {
        received.delivery_id or ""
        for received in receiver.received[-4 * SLOTS :]
        if received.monotonic > since
    }


async def _leased_by(conn: Connection, replica: str) -> set[str]:
    """The delivery ids of the open runs that this replica has leased."""
    rows = await conn.fetch(
        """SELECT idempotency_key::text FROM job_run
            WHERE status IN ('pending', 'retrying') AND split_part(claimed_by, '/', 1) = $1""",
        replica,
    )
    return {row[0] for row in rows}
