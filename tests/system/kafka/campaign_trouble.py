"""Long trouble under a steady load, with lateness judged: not part of a plain run of the tests, but of

python -m tests.campaign kafka
"""

# ruff: noqa: T201 - the figures are what a campaign is for

from __future__ import annotations

import asyncio
import signal
from datetime import datetime, timedelta

import pytest

from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import BrokerPlace, OwnBroker, place_on
from tests.system.kafka.modes import PARTITIONS, all_receive, figures, kafka_mode
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
    percentiles,
    steady_load,
)
from tests.system.replicas import Fleet, Replica
from tests.system.seeding import seed_one_offs, soon

RECOVERED_WITHIN = timedelta(minutes=3)
BURST = 12_000
SLOTS = 50
SLOW = timedelta(milliseconds=250)
"""What a delivery takes in the burst: 400 a second at the most, half a minute for all."""
LEASE = timedelta(seconds=6)
"""That of `replicas.SHORT`: what a frozen replica had leased and not sent waits for its end."""


async def test_a_broker_that_is_away_for_half_a_minute(
    fleet: Fleet, db: Connection, receiver: Receiver, own_reference: OwnBroker
) -> None:
    place = place_on(own_reference.server)
    replicas = await _started(fleet, place)
    load = await steady_load(db, receiver, seconds=60)
    await receiver.wait_for(10 * PER_SECOND, timeout=timedelta(seconds=60))
    await own_reference.halt()
    await asyncio.sleep(30)  # how long it is away, not a wait for anything
    await own_reference.resume()
    await each_delivered_once(db, receiver, runs=load.runs)
    await _recovers(db, receiver, replicas, name=f"{own_reference.server.name} away for 30 s", runs=load.runs)


async def test_a_broker_that_is_stopped_for_half_a_minute_in_the_middle_of_a_burst(
    fleet: Fleet, db: Connection, receiver: Receiver, own_reference: OwnBroker
) -> None:
    """The burst goes on meanwhile, by the sweep alone, and what is planned in that time is late by the grace."""
    receiver.answer("/burst", Reply(delay=SLOW))
    fleet.settings["SCHEDULER_EXECUTOR_SLOTS"] = str(SLOTS)
    replicas = await _started(fleet, place_on(own_reference.server))
    at = await soon(db, ahead=timedelta(seconds=6))
    await seed_one_offs(db, BURST, url=f"{receiver.url}/burst", at=at, tenants=50)
    await receiver.wait_for(BURST // 10, timeout=timedelta(seconds=60))
    await own_reference.halt()
    before = len(receiver.received)
    await asyncio.sleep(30)  # how long it is away, not a wait for anything
    meanwhile = len(receiver.received) - before
    await own_reference.resume()
    resumed_at = await soon(db)
    await each_delivered_once(db, receiver, runs=BURST)
    print(
        f"\n{own_reference.server.name} stopped mid-burst: {meanwhile} of {BURST} delivered in the 30 s without it"
    )
    assert meanwhile > BURST // 3, "it went on"
    load = await steady_load(db, receiver, seconds=10)
    await each_delivered_once(db, receiver, runs=BURST + load.runs)
    worst = await latest(db, planned_from=resumed_at)
    assert worst < LATE_AT_MOST
    again = await hints_flow_again(db, receiver, replicas, within=RECOVERED_WITHIN)
    await each_delivered_once(db, receiver, runs=BURST + load.runs + again)
    print(f"latest of what was planned after it was back: {worst.total_seconds():.1f} s")


async def test_a_topic_that_is_deleted_again_and_again(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    replicas = await _started(fleet, reference)
    load = await steady_load(db, receiver, seconds=45)
    for part in (1, 2, 3):
        await receiver.wait_for(part * 10 * PER_SECOND, timeout=timedelta(seconds=60))
        await delete_topic(reference)
    await each_delivered_once(db, receiver, runs=load.runs)
    await _recovers(
        db, receiver, replicas, name=f"{reference.server.name} topic deleted 3 times", runs=load.runs
    )


async def test_offsets_that_are_set_to_the_end_and_to_the_beginning(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    """A group's offsets can be moved while it has no members: between two generations of replicas."""
    if not reference.server.lets_offsets_be_moved:
        pytest.skip(f"{reference.server.name} does not let offsets be moved")
    replicas = await _started(fleet, reference)
    runs = 0
    for generation, to_end in enumerate((True, False)):
        load = await steady_load(db, receiver, seconds=20)
        runs += load.runs
        await receiver.wait_for(runs - load.runs // 2, timeout=timedelta(seconds=60))
        for replica in replicas:
            replica.send(signal.SIGTERM)
        assert [await replica.ended() for replica in replicas] == [0, 0]
        await move_offsets(reference, partitions=PARTITIONS, to_end=to_end)
        names = (f"one-{generation}", f"two-{generation}")
        replicas = await fleet.start(*names, **kafka_mode(reference))
        load = await steady_load(db, receiver, seconds=10)
        runs += load.runs
        await each_delivered_once(db, receiver, runs=runs)
        worst = await latest(db, planned_from=load.begins_at)
        counted = await figures(replicas)
        print(
            f"\n{reference.server.name} offsets to the {'end' if to_end else 'beginning'}: {runs} runs once each; worst"
            f" since the start of new replicas {worst.total_seconds():.1f} s; hints refused {counted['hints refused']},"
            f" stale {counted['hints stale']}"
        )
        assert worst < LATE_AT_MOST


async def test_a_broker_that_is_silent_for_20_seconds(
    fleet: Fleet, db: Connection, receiver: Receiver, own_reference: OwnBroker
) -> None:
    place = place_on(own_reference.server)
    replicas = await _started(fleet, place)
    load = await steady_load(db, receiver, seconds=45)
    await receiver.wait_for(10 * PER_SECOND, timeout=timedelta(seconds=60))
    own_reference.freeze()
    await asyncio.sleep(20)
    own_reference.thaw()
    await each_delivered_once(db, receiver, runs=load.runs)
    await _recovers(
        db, receiver, replicas, name=f"{own_reference.server.name} silent for 20 s", runs=load.runs
    )


async def test_two_minutes_of_members_that_come_and_go(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    replicas = await _started(fleet, reference)
    load = await steady_load(db, receiver, seconds=120)
    async with coming_and_going(reference, every=timedelta(seconds=3)) as rounds:
        await each_delivered_once(db, receiver, runs=load.runs)
    print(f"\n{len(rounds)} joined and left")
    await _recovers(db, receiver, replicas, name=f"{reference.server.name} storm", runs=load.runs)


async def test_replicas_that_come_and_go_with_their_early_hints(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    """Rolling restarts without a pause, for as long as the load lasts."""
    mode = kafka_mode(reference)
    [staying, old] = await fleet.start("staying", "restarted-0", **mode)
    load = await steady_load(db, receiver, seconds=60)
    number = 0
    while len(receiver.received) < load.runs:
        number += 1
        [new] = await fleet.start(f"restarted-{number}", **mode)
        old.send(signal.SIGTERM)
        assert await old.ended() == 0
        old = new
    await each_delivered_once(db, receiver, runs=load.runs)
    print(
        f"\n{number} restarts on {reference.server.name}, latest {(await latest(db)).total_seconds():.1f} s"
    )
    assert await latest(db) < LATE_AT_MOST
    if reference.server.stands_restarts:
        await _recovers(
            db, receiver, [staying, old], name=f"{reference.server.name} restarts", runs=load.runs
        )


async def test_a_replica_that_is_frozen_beyond_its_session_and_wakes(
    fleet: Fleet, db: Connection, receiver: Receiver, reference: BrokerPlace
) -> None:
    """What it had on the wire is sent again by another, with evidence: the only deliveries that may come twice."""
    fleet.expect("loop.failed")  # a turn that was frozen with its statement
    replicas = await _started(fleet, reference)
    frozen = replicas[0]
    load = await steady_load(db, receiver, seconds=60)
    await receiver.wait_for(10 * PER_SECOND, timeout=timedelta(seconds=60))
    frozen.send(signal.SIGSTOP)
    await asyncio.sleep(25)
    frozen.send(signal.SIGCONT)
    repeated = await each_delivered_or_repeated_with_evidence(db, receiver, runs=load.runs)
    worst = await latest(db)
    print(
        f"\n{reference.server.name} frozen replica: {len(repeated)} of {load.runs} repeated, each with evidence;"
        f" lateness p50, p99 {await percentiles(db)} s, worst {worst.total_seconds():.1f} s"
    )
    assert worst < LATE_AT_MOST + LEASE
    await all_receive(*replicas)
    await hints_flow_again(db, receiver, replicas, within=RECOVERED_WITHIN)


async def _started(fleet: Fleet, place: BrokerPlace) -> list[Replica]:
    replicas = await fleet.start("one", "two", **kafka_mode(place))
    await all_receive(*replicas)
    return replicas


async def _recovers(
    conn: Connection, receiver: Receiver, replicas: list[Replica], *, name: str, runs: int
) -> None:
    """Late by grace and sweep at the most while the trouble lasted, and by hint again afterwards."""
    worst = await latest(conn)
    begun: datetime = await soon(conn)
    again = await hints_flow_again(conn, receiver, replicas, within=RECOVERED_WITHIN)
    await each_delivered_once(conn, receiver, runs=runs + again)
    ended: datetime = await soon(conn)
    print(
        f"\n{name}: lateness p50, p99 {await percentiles(conn)} s, worst {worst.total_seconds():.1f} s; all by hint"
        f" again {(ended - begun).total_seconds():.0f} s later; {dict(await figures(replicas))}"
    )
    assert worst < LATE_AT_MOST
