"""A replica is killed in the middle of a burst: every run ends, and every second delivery has its evidence."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.eventually import eventually
from tests.system import evidence
from tests.system.replicas import Fleet
from tests.system.seeding import seed_one_offs, soon

RUNS = 600
SLOTS = 40
ANSWER_AFTER = timedelta(milliseconds=300)


async def test_after_kill_9_every_run_ends_and_every_duplicate_has_its_evidence(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/", Reply(delay=ANSWER_AFTER))
    doomed, _ = await fleet.start("doomed", "survivor", executor_slots=str(SLOTS))
    at = await soon(db, ahead=timedelta(seconds=3))
    await seed_one_offs(db, RUNS, url=f"{receiver.url}/slow", at=at, tenants=20)
    await receiver.wait_for(2 * SLOTS)

    async def killed_with_requests_on_the_wire() -> set[str]:
        leased = await _leased_by(db, doomed.name)
        on_the_wire = leased & _unanswered(receiver)
        if on_the_wire:
            doomed.send(signal.SIGKILL)
        return on_the_wire

    on_the_wire = await eventually(killed_with_requests_on_the_wire)
    assert await doomed.ended() == -signal.SIGKILL
    cut_off = await _leased_by(db, doomed.name)
    await evidence.all_ended(db, runs=RUNS)

    assert await evidence.statuses(db) == {"succeeded": RUNS}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(db), "none is missing"
    found = await evidence.attempts(db)
    lost = evidence.with_outcome(found, "lease_lost")
    assert on_the_wire <= cut_off
    assert lost == cut_off
    assert on_the_wire <= evidence.repeated(receiver.received) <= lost
    assert max(arrived.values()) == 2
    assert evidence.same_number_twice(receiver.received) == set(), "the number of a lost attempt is spent"
    assert {attempt.worker for attempt in found if attempt.outcome == "lease_lost"} == {"doomed"}
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
