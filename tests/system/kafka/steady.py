"""A steady load with trouble in it, and what its evidence must say: nothing lost, nothing twice, nothing late for
long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from app.claim.kafka.calls import stop_consumer
from app.local.receiver import Receiver
from app.loops import sleep_or_stop
from app.store.pool import Connection
from tests.brokers import BrokerPlace
from tests.eventually import eventually
from tests.system import evidence
from tests.system.kafka.modes import GRACE, SWEEP, figures
from tests.system.replicas import Replica
from tests.system.seeding import seed_one_offs, soon

PER_SECOND = 40
TENANTS = 20
BATCH = 100
LEAD = timedelta(seconds=3)
LOAD_WITHIN = timedelta(minutes=10)
MARGIN = timedelta(seconds=4)
"""For a machine that is busy with all of this at once."""
LATE_AT_MOST = GRACE + SWEEP + MARGIN
"""Whatever goes on with the broker: the sweep has a run by then."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many runs, each second's due at its whole second, from `begins_at` until `ends_at`."""

    begins_at: datetime
    ends_at: datetime
    runs: int


async def steady_load(conn: Connection, receiver: Receiver, *, seconds: int) -> Load:
    """Begins in a moment."""
    begins_at = await soon(conn, ahead=LEAD)
    for second in range(seconds):
        at = begins_at + timedelta(seconds=second)
        await seed_one_offs(conn, PER_SECOND, url=f"{receiver.url}/steady", at=at, tenants=TENANTS)
    return Load(begins_at, begins_at + timedelta(seconds=seconds), PER_SECOND * seconds)


async def each_delivered_once(conn: Connection, receiver: Receiver, *, runs: int) -> None:
    """Wait for the end of all runs; exactly one attempt each, and it was delivered."""
    await receiver.wait_for(runs, timeout=LOAD_WITHIN)
    await evidence.all_ended(conn, runs=runs)
    assert await evidence.statuses(conn) == {"succeeded": runs}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived) == await evidence.delivery_ids(conn)
    assert set(arrived.values()) == {1}
    found = await evidence.attempts(conn)
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}


async def each_delivered_or_repeated_with_evidence(
    conn: Connection, receiver: Receiver, *, runs: int
) -> set[str]:
    """Wait for the end of all runs; only those whose lease was lost were sent again. The ids of those that were."""
    await receiver.wait_until(lambda: len(receiver.counts()) == runs, timeout=LOAD_WITHIN)
    await evidence.all_ended(conn, runs=runs)
    assert await evidence.statuses(conn) == {"succeeded": runs}
    assert set(evidence.arrivals(receiver.received)) == await evidence.delivery_ids(conn)
    found = await evidence.attempts(conn)
    repeated = evidence.repeated(receiver.received)
    assert repeated <= evidence.with_outcome(found, "lease_lost")
    assert evidence.same_number_twice(receiver.received) == set()
    return repeated


async def hints_flow_again(
    conn: Connection, receiver: Receiver, replicas: Sequence[Replica], *, within: timedelta
) -> int:
    """Have batch after batch planned until all of one is claimed by its hints: when the clients are back, they decide.
    How many runs that were."""
    runs = 0

    async def all_by_hint() -> bool:
        nonlocal runs
        before, arrived = await figures(replicas), len(receiver.received)
        runs += BATCH
        at = await soon(conn, ahead=LEAD)
        await seed_one_offs(conn, BATCH, url=f"{receiver.url}/again", at=at, tenants=TENANTS)
        await receiver.wait_for(arrived + BATCH, timeout=evidence.ALL_END_WITHIN)
        now = await figures(replicas)
        assert now["hints sent"] - before["hints sent"] == BATCH
        assert now["hints claimed"] - before["hints claimed"] == BATCH
        return True

    await eventually(all_by_hint, within=within)
    return runs


async def latest(conn: Connection, *, planned_from: datetime | None = None) -> timedelta:
    """The greatest lateness of the first attempts, of runs planned for this instant or later."""
    found: timedelta = await conn.fetchval(
        """SELECT max(a.started_at - r.scheduled_for)
             FROM run_attempt AS a
             JOIN job_run AS r ON r.id = a.run_id AND r.scheduled_for = a.scheduled_for
            WHERE a.attempt = 1 AND r.scheduled_for >= coalesce($1::timestamptz, '-infinity')""",
        planned_from,
    )
    return found


@asynccontextmanager
async def coming_and_going(place: BrokerPlace, *, every: timedelta) -> AsyncIterator[list[int]]:
    """Somebody joins the group and leaves it again, over and over; how often is in the list. It commits nothing."""
    rounds: list[int] = []
    ending = asyncio.Event()

    async def come_and_go() -> None:
        while not ending.is_set():
            consumer = AIOKafkaConsumer(
                bootstrap_servers=place.bootstrap, group_id=place.group, enable_auto_commit=False
            )
            try:
                await consumer.start()
                consumer.subscribe([place.topic])
                await sleep_or_stop(every, ending)  # a rhythm, not a synchronisation
            finally:
                await stop_consumer(consumer)
            rounds.append(len(rounds))
            await sleep_or_stop(every, ending)

    going = asyncio.create_task(come_and_go())
    try:
        yield rounds
    finally:
        ending.set()
        await going


async def delete_topic(place: BrokerPlace) -> None:
    """Away with it and all that is on it."""
    admin = AIOKafkaAdminClient(bootstrap_servers=place.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([place.topic])
    finally:
        await admin.close()


async def move_offsets(place: BrokerPlace, *, partitions: int, to_end: bool) -> None:
    """Set what the group has committed to the topic's beginning or end, while the group has no members."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=place.bootstrap, group_id=place.group, enable_auto_commit=False
    )
    await consumer.start()
    try:
        every = [TopicPartition(place.topic, number) for number in range(partitions)]
        consumer.assign(every)
        ends = await consumer.end_offsets(every)
        await consumer.commit({one: ends[one] if to_end else 0 for one in every})
    finally:
        await consumer.stop()


async def percentiles(conn: Connection) -> list[float]:
    """Half and 99 % of the first attempts were not later than so many seconds."""
    found: list[float] = await conn.fetchval(
        """SELECT percentile_cont(ARRAY[0.5, 0.99])
                  WITHIN GROUP (ORDER BY extract(epoch FROM a.started_at - r.scheduled_for))
             FROM run_attempt AS a
             JOIN job_run AS r ON r.id = a.run_id AND r.scheduled_for = a.scheduled_for
            WHERE a.attempt = 1"""
    )
    return [round(seconds, 3) for seconds in found]
