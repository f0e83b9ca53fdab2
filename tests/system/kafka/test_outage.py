"""The broker is away: at the start, and in the middle of a burst. Lateness, and nothing else."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import OwnBroker, place_on
from tests.eventually import eventually
from tests.system import evidence
from tests.system.kafka.modes import JOINED_WITHIN, all_receive, figures, kafka_mode
from tests.system.replicas import Fleet
from tests.system.seeding import seed_one_offs, soon
from tests.system.tenancy import new_tenant

BURST = 2_000
AFTERWARDS = 100
SLOTS = 40
AWAY = 4.0


async def test_without_a_broker_everything_fires_and_with_it_again_hints_flow_again(
    fleet: Fleet, db: Connection, receiver: Receiver, own_broker: OwnBroker
) -> None:
    receiver.answer("/", Reply(delay=timedelta(milliseconds=100)))
    await own_broker.halt()
    mode = kafka_mode(place_on(own_broker.server))
    replicas = await fleet.start("one", "two", executor_slots=str(SLOTS), **mode)
    async with new_tenant(replicas[0]) as tenant:
        schedule = await tenant.create("s", {"kind": "every", "every_seconds": 3600}, f"{receiver.url}/now")
        assert (await tenant.ended(await tenant.run_now(schedule)))["status"] == "succeeded"
    assert (await figures(replicas))["hints sent"] == 0
    await own_broker.resume()
    await all_receive(*replicas)

    at = await soon(db, ahead=timedelta(seconds=4))
    await seed_one_offs(db, BURST, url=f"{receiver.url}/burst", at=at, tenants=20)
    await receiver.wait_for(BURST // 5)
    await own_broker.halt()
    await asyncio.sleep(AWAY)  # how long it is away, not a wait for anything
    await own_broker.resume()
    await receiver.wait_for(1 + BURST, timeout=evidence.ALL_END_WITHIN)

    # Batch after batch until one is claimed by its hints: when the clients are back, they decide.
    sent = claimed = 0
    total = 1 + BURST

    async def hints_flow() -> bool:
        nonlocal total, sent, claimed
        before = await figures(replicas)
        total += AFTERWARDS
        at = await soon(db, ahead=timedelta(seconds=3))
        await seed_one_offs(db, AFTERWARDS, url=f"{receiver.url}/after", at=at, tenants=20)
        await receiver.wait_for(total, timeout=evidence.ALL_END_WITHIN)
        now = await figures(replicas)
        sent, claimed = (now[name] - before[name] for name in ("hints sent", "hints claimed"))
        return sent == claimed == AFTERWARDS

    await eventually(hints_flow, within=JOINED_WITHIN)
    await evidence.all_ended(db, runs=total)
    assert await evidence.statuses(db) == {"succeeded": total}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(db)
    assert set(arrived.values()) == {1}
    found = await evidence.attempts(db)
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    for replica in replicas:
        assert replica.events("kafka.unavailable", "kafka.receive_failed"), "it has told of the outage"
