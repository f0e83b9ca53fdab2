"""Trouble with the topic and the group under a steady load, in small; the long ones are in `campaign_trouble.py`."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

import pytest

from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import BrokerPlace
from tests.system.kafka.modes import JOINED_WITHIN, PARTITIONS, all_receive, figures, kafka_mode
from tests.system.kafka.steady import (
    LATE_AT_MOST,
    PER_SECOND,
    coming_and_going,
    delete_topic,
    each_delivered_once,
    each_delivered_or_repeated_with_evidence,
    hints_flow_again,
    latest,
    move_offsets,
    steady_load,
)
from tests.system.replicas import Fleet

FROZEN = 11.5
"""Seconds; a session lasts for 10."""
LEASE = timedelta(seconds=6)
"""That of `replicas.SHORT`: what the frozen one had leased and not sent waits for its end."""


async def test_members_that_come_and_go_and_a_topic_that_is_deleted_lose_and_repeat_nothing(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    replicas = await fleet.start("one", "two", **kafka_mode(reference))
    await all_receive(*replicas)
    load = await steady_load(db, receiver, seconds=15)
    async with coming_and_going(reference, every=timedelta(seconds=1)) as rounds:
        await receiver.wait_for(5 * PER_SECOND, timeout=timedelta(seconds=60))
        await delete_topic(reference)
        await each_delivered_once(db, receiver, runs=load.runs)
    assert rounds
    assert await latest(db) < LATE_AT_MOST
    again = await hints_flow_again(db, receiver, replicas, within=JOINED_WITHIN)
    await each_delivered_once(db, receiver, runs=load.runs + again)


async def test_offsets_that_are_set_back_repeat_nothing_and_set_forth_lose_nothing(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    if not reference.server.lets_offsets_be_moved:
        pytest.skip(f"{reference.server.name} does not let offsets be moved")
    mode = kafka_mode(reference) | {"planner_lookahead": "20s"}
    [first] = await fleet.start("first", **mode)
    await all_receive(first)
    load = await steady_load(db, receiver, seconds=8)
    await receiver.wait_for(2 * PER_SECOND, timeout=timedelta(seconds=60))
    assert (await figures([first]))["hints received"] > 2 * PER_SECOND, "early ones wait"
    first.send(signal.SIGTERM)
    assert await first.ended() == 0
    await move_offsets(reference, partitions=PARTITIONS, to_end=True)
    [second] = await fleet.start("second", **mode)
    await each_delivered_once(db, receiver, runs=load.runs)
    second.send(signal.SIGTERM)
    assert await second.ended() == 0
    await move_offsets(reference, partitions=PARTITIONS, to_end=False)
    [third] = await fleet.start("third", **mode)
    await all_receive(third)
    again = await steady_load(db, receiver, seconds=2)
    await each_delivered_once(db, receiver, runs=load.runs + again.runs)
    assert await latest(db, planned_from=again.begins_at) < LATE_AT_MOST
    counted = await figures([third])
    assert counted["hints refused"] + counted["hints stale"] >= load.runs, "all the old hints came again"
    assert counted["claimed_runs"] == again.runs


async def test_a_replica_that_is_frozen_beyond_its_session_costs_nothing_but_what_it_had_on_the_wire(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    """The other one goes on in time; what the frozen one had sent is sent again, with evidence."""
    fleet.expect("loop.failed")  # a turn that was frozen with its statement
    frozen, _ = await fleet.start("frozen", "awake", **kafka_mode(reference))
    await all_receive(*fleet.replicas)
    load = await steady_load(db, receiver, seconds=12)
    await receiver.wait_for(PER_SECOND, timeout=timedelta(seconds=60))
    frozen.send(signal.SIGSTOP)
    await asyncio.sleep(FROZEN)  # how long it stands still, not a wait for anything
    frozen.send(signal.SIGCONT)
    await each_delivered_or_repeated_with_evidence(db, receiver, runs=load.runs)
    assert await latest(db) < LATE_AT_MOST + LEASE
