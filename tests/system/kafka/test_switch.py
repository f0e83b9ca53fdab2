"""From one claim mode to the other and back while thousands of runs are in flight: replicas of both modes at once."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import BrokerPlace
from tests.system import evidence
from tests.system.kafka.modes import all_receive, figures, kafka_mode
from tests.system.replicas import Fleet, Replica
from tests.system.seeding import seed_one_offs, soon

RUNS = 5_000
SLOTS = 40
STEP = 500
ALL_WITHIN = timedelta(seconds=200)


async def test_a_switch_of_modes_and_back_in_a_burst_repeats_and_loses_nothing(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    receiver.answer("/", Reply(delay=timedelta(milliseconds=300)))
    fleet.settings["SCHEDULER_EXECUTOR_SLOTS"] = str(SLOTS)
    before = await fleet.start("before-1", "before-2")
    at = await soon(db, ahead=timedelta(seconds=3))
    for later in (0, 8, 16, 24):
        await seed_one_offs(
            db, RUNS // 4, url=f"{receiver.url}/b", at=at + timedelta(seconds=later), tenants=20
        )
    await receiver.wait_for(STEP)
    between = await fleet.start("between-1", "between-2", **kafka_mode(reference))
    await all_receive(*between)
    await _leave(before)
    await receiver.wait_for(len(receiver.received) + STEP)
    told = await figures(between)
    after = await fleet.start("after-1", "after-2")
    await _leave(between)
    assert len(receiver.received) < RUNS, "some were still to be claimed in the second switch"
    await receiver.wait_for(RUNS, timeout=ALL_WITHIN)
    await evidence.all_ended(db, runs=RUNS)

    assert await evidence.statuses(db) == {"succeeded": RUNS}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(db)
    assert set(arrived.values()) == {1}
    found = await evidence.attempts(db)
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    workers = {attempt.worker.partition("-")[0] for attempt in found}
    assert workers == {"before", "between", "after"}
    assert told["claimed_runs"] > 0
    assert all(replica.is_running for replica in after)


async def _leave(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        replica.send(signal.SIGTERM)
    assert [await replica.ended() for replica in replicas] == [0] * len(replicas)
