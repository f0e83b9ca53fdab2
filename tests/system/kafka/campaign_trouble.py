"""Long trouble under a steady load, with lateness judged: not part of a plain run of the tests, but of

python -m tests.campaign kafka
"""

# ruff: noqa: T201 - the figures are what a campaign is for

from __future__ import annotations

import asyncio
import signal
from datetime import datetime, timedelta

from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.brokers import BrokerPlace, OwnBroker, place_on
from tests.system import evidence
from tests.system.kafka.modes import SWEEP, all_receive, figures, kafka_mode
from tests.system.kafka.steady import (
    PER_SECOND,
    coming_and_going,
    each_delivered_once,
    hints_flow_again,
    latest,
    percentiles,
    steady_load,
)
from tests.system.replicas import Fleet, Replica
from tests.system.seeding import soon

GRACE = timedelta(seconds=2)
MARGIN = timedelta(seconds=6)
"""For a machine that is busy with all of this at once."""
BOUND = GRACE + SWEEP + MARGIN
RECOVERED_WITHIN = timedelta(minutes=3)


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
    mode = kafka_mode(reference, grace=GRACE)
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
    print(f"\n{number} restarts")
    await _recovers(db, receiver, [staying, old], name=f"{reference.server.name} restarts", runs=load.runs)


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
    await receiver.wait_until(lambda: len(receiver.counts()) == load.runs, timeout=timedelta(seconds=180))
    await evidence.all_ended(db, runs=load.runs)
    assert await evidence.statuses(db) == {"succeeded": load.runs}
    found = await evidence.attempts(db)
    assert evidence.repeated(receiver.received) <= evidence.with_outcome(found, "lease_lost")
    assert evidence.same_number_twice(receiver.received) == set()
    print(f"\n{reference.server.name} frozen replica: {len(evidence.repeated(receiver.received))} repeated")
    assert await latest(db) < BOUND
    await all_receive(*replicas)
    await hints_flow_again(db, receiver, replicas, within=RECOVERED_WITHIN)


async def _started(fleet: Fleet, place: BrokerPlace) -> list[Replica]:
    replicas = await fleet.start("one", "two", **kafka_mode(place, grace=GRACE))
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
    assert worst < BOUND
