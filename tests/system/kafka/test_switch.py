"""From one claim mode to the other and back while thousands of runs are in flight: replicas of both modes at once."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import BrokerPlace
from tests.eventually import eventually
from tests.system import evidence
from tests.system.kafka.modes import all_receive, figures, kafka_mode
from tests.system.replicas import Fleet, Replica
from tests.system.seeding import seed_one_offs, soon

IN_FLIGHT = 5_000
MORE = 2_500
SLOTS = 40
STEP = 200
SLOW = Reply(delay=timedelta(seconds=1))
"""While replicas come and go: thousands are in flight in both switches, however long starts take."""
QUICK = Reply(delay=timedelta(milliseconds=50))
ALL_WITHIN = timedelta(seconds=200)


async def test_a_switch_of_modes_and_back_in_a_burst_repeats_and_loses_nothing(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    receiver.answer("/", SLOW)
    fleet.settings["SCHEDULER_EXECUTOR_SLOTS"] = str(SLOTS)
    before = await fleet.start("before-1", "before-2")
    await _burst(db, receiver, IN_FLIGHT)
    await receiver.wait_for(STEP)
    between = await fleet.start("between-1", "between-2", **kafka_mode(reference))
    await all_receive(*between)
    await _leave(before)
    assert len(receiver.received) < IN_FLIGHT // 2, "most were still to be claimed in the first switch"
    await _burst(db, receiver, MORE)

    async def both_sources() -> bool:
        told = await figures(between)
        return told["hints claimed"] > 0 and told["claimed_runs"] - told["hints claimed"] > 0

    await eventually(both_sources, within=ALL_WITHIN)
    after = await fleet.start("after-1", "after-2")
    await _leave(between)
    assert len(receiver.received) < IN_FLIGHT, "thousands were still to be claimed in the second switch"
    receiver.answer("/", QUICK)
    runs = IN_FLIGHT + MORE
    await receiver.wait_for(runs, timeout=ALL_WITHIN)
    await evidence.all_ended(db, runs=runs)

    assert await evidence.statuses(db) == {"succeeded": runs}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(db)
    assert set(arrived.values()) == {1}
    found = await evidence.attempts(db)
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    workers = {attempt.worker.partition("-")[0] for attempt in found}
    assert workers == {"before", "between", "after"}
    assert all(replica.is_running for replica in after)


async def _burst(conn: Connection, receiver: Receiver, runs: int) -> None:
    at = await soon(conn, ahead=timedelta(seconds=2))
    await seed_one_offs(conn, runs, url=f"{receiver.url}/b", at=at, tenants=20)


async def _leave(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        replica.send(signal.SIGTERM)
    assert [await replica.ended() for replica in replicas] == [0] * len(replicas)
