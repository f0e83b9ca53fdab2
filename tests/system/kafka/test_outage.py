"""The broker is away: at the start, and in the middle of a burst. Lateness, and nothing else."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import OwnBroker, place_on
from tests.system import evidence
from tests.system.kafka.modes import JOINED_WITHIN, all_receive, figures, kafka_mode
from tests.system.kafka.steady import LATE_AT_MOST, each_delivered_once, hints_flow_again, latest
from tests.system.replicas import Fleet
from tests.system.seeding import seed_one_offs, soon
from tests.system.tenancy import new_tenant

BURST = 2_000
SLOTS = 40
AWAY = 4.0
BURST_TAKES = timedelta(seconds=5)
"""Of 100 ms each, 80 at once: half of it is for the machine."""


async def test_without_a_broker_everything_fires_and_with_it_again_hints_flow_again(
    fleet: Fleet, db: Connection, receiver: Receiver, own_reference: OwnBroker
) -> None:
    receiver.answer("/", Reply(delay=timedelta(milliseconds=100)))
    await own_reference.halt()
    mode = kafka_mode(place_on(own_reference.server))
    replicas = await fleet.start("one", "two", executor_slots=str(SLOTS), **mode)
    async with new_tenant(replicas[0]) as tenant:
        schedule = await tenant.create("s", {"kind": "every", "every_seconds": 3600}, f"{receiver.url}/now")
        assert (await tenant.ended(await tenant.run_now(schedule)))["status"] == "succeeded"
    assert (await figures(replicas))["hints sent"] == 0
    await own_reference.resume()
    await all_receive(*replicas)

    at = await soon(db, ahead=timedelta(seconds=4))
    await seed_one_offs(db, BURST, url=f"{receiver.url}/burst", at=at, tenants=20)
    await receiver.wait_for(BURST // 5)
    await own_reference.halt()
    await asyncio.sleep(AWAY)  # how long it is away, not a wait for anything
    await own_reference.resume()
    await receiver.wait_for(1 + BURST, timeout=evidence.ALL_END_WITHIN)
    assert await latest(db) < BURST_TAKES + LATE_AT_MOST

    again = await hints_flow_again(db, receiver, replicas, within=JOINED_WITHIN)
    await each_delivered_once(db, receiver, runs=1 + BURST + again)
    for replica in replicas:
        assert replica.events("kafka.unavailable", "kafka.receive_failed"), "it has told of the outage"
