"""A clean rolling restart: hints that wait for their time are received again by the next owner, in time."""

from __future__ import annotations

import signal
from datetime import timedelta

from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import BrokerPlace
from tests.eventually import eventually
from tests.system import evidence
from tests.system.kafka.modes import all_receive, figures, kafka_mode
from tests.system.replicas import Fleet
from tests.system.seeding import seed_one_offs, soon

EARLY = 300
AHEAD = timedelta(seconds=20)
GRACE = timedelta(seconds=60)
"""What is claimed before it is over, no sweep has claimed."""
ON_TIME = timedelta(seconds=5)
"""For a busy machine, and less than what hints cost that are received again too late: they were 9 s late once."""


async def test_early_hints_outlast_a_rolling_restart_and_fire_on_time(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    mode = kafka_mode(reference, grace=GRACE) | {"planner_lookahead": "60s"}
    old = await fleet.start("old-1", "old-2", **mode)
    await all_receive(*old)
    await seed_one_offs(db, EARLY, url=f"{receiver.url}/e", at=await soon(db, ahead=AHEAD), tenants=30)

    async def all_wait() -> bool:
        return (await figures(old))["hints_waiting"] == EARLY

    await eventually(all_wait)
    for leaving, coming in zip(old, ("new-1", "new-2"), strict=True):
        leaving.send(signal.SIGTERM)
        assert await leaving.ended() == 0
        await fleet.start(coming, **mode)
    await receiver.wait_for(EARLY, timeout=AHEAD + 2 * GRACE)
    await evidence.all_ended(db, runs=EARLY)

    assert set(evidence.arrivals(receiver.received).values()) == {1}
    latest: timedelta = await db.fetchval(
        """SELECT max(a.started_at - r.scheduled_for)
             FROM run_attempt AS a JOIN job_run AS r ON r.id = a.run_id AND r.scheduled_for = a.scheduled_for"""
    )
    assert latest < ON_TIME
    assert {attempt.worker.partition("-")[0] for attempt in await evidence.attempts(db)} <= {"old", "new"}
