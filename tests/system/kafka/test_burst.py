"""Two replicas, ten thousand runs due at one instant, a topic on which anybody writes anything: exactly once each."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from uuid import UUID, uuid4

from aiokafka import AIOKafkaProducer

from app.claim.kafka.hint import encode
from app.domain.ids import RunId, ScheduleId, TenantId, run_id
from app.domain.run import RunRef
from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store.pool import Connection, Pool
from tests.brokers import BrokerPlace
from tests.eventually import eventually
from tests.system import evidence
from tests.system.kafka.modes import all_receive, figures, kafka_mode
from tests.system.replicas import Fleet
from tests.system.seeding import seed_due, seed_one_offs, soon

RUNS = 10_000
UNHINTED = 200
TENANTS = 50
SLOTS = 60
CAP = 30
AHEAD = timedelta(seconds=9)
BURST_WITHIN = timedelta(seconds=200)


async def test_ten_thousand_due_runs_are_each_delivered_exactly_once_whatever_lies_on_the_topic(
    fleet: Fleet, dsn: str, pool: Pool, db: Connection, receiver: Receiver, broker: BrokerPlace
) -> None:
    """The planner's hints for all runs arrive; so do all of them again and again, from us, beside hints that are stale,
    early, foreign or no hints at all. And 200 due runs have no hint: it was lost."""
    receiver.answer("/", Reply(delay=timedelta(milliseconds=20)))
    replicas = await fleet.start("one", "two", executor_slots=str(SLOTS), **kafka_mode(broker))
    await all_receive(*replicas)
    at = await soon(db, ahead=AHEAD)
    await seed_one_offs(db, RUNS, url=f"{receiver.url}/burst", at=at, tenants=TENANTS)
    async with evidence.watched_leases(dsn) as most_leases, _disturbed(pool, broker) as disturbance:
        await seed_due(
            db,
            tenants=2,
            each=UNHINTED // 2,
            url=f"{receiver.url}/lost",
            due_since=await soon(db),
            first_tenant=TENANTS + 1,
        )
        await receiver.wait_for(RUNS + UNHINTED, timeout=BURST_WITHIN)
        await evidence.all_ended(db, runs=RUNS + UNHINTED)
    malformed, told = disturbance

    assert await evidence.statuses(db) == {"succeeded": RUNS + UNHINTED}
    found = await evidence.attempts(db)
    assert len(found) == RUNS + UNHINTED
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived.values()) == {1}
    assert set(arrived) == await evidence.delivery_ids(db)
    busiest = await evidence.busiest(db)
    assert set(busiest) == {"one", "two"}, "both replicas took their part"
    assert max(busiest.values()) <= SLOTS
    assert max(most_leases.values()) <= SLOTS
    assert await _busiest_tenant(db) <= CAP
    assert len(malformed) > 0
    assert len(told) > 0

    async def all_passed_over() -> bool:
        counted = await figures(replicas)
        assert counted["hints malformed"] >= len(malformed), counted
        return True

    await eventually(all_passed_over)
    counted = await figures(replicas)
    assert counted["hints sent"] == RUNS
    assert counted["claimed_runs"] == RUNS + UNHINTED
    assert counted["hints claimed"] > 0
    assert counted["claimed_runs"] - counted["hints claimed"] >= UNHINTED


@asynccontextmanager
async def _disturbed(
    pool: Pool, place: BrokerPlace
) -> AsyncIterator[tuple[list[bytes | None], list[RunRef]]]:
    """While the block runs, write what nobody should onto the topic: messages that are no hints (the first list), and
    hints that are true, but repeated, or nearly true (the second)."""
    rng = random.Random(5)
    malformed: list[bytes | None] = []
    told: list[RunRef] = []
    producer = AIOKafkaProducer(bootstrap_servers=place.bootstrap)
    await producer.start()

    async def write(key: bytes | None, value: bytes | None) -> None:
        await producer.send(place.topic, key=key, value=value)

    async def disturb() -> None:
        while True:
            for value in _NO_HINTS:
                await write(uuid4().bytes, value)
                malformed.append(value)
            await write(None, b"no key")
            malformed.append(b"no key")
            for ref in _variants(rng, await _some_runs(pool, 300)):
                await write(*encode(ref, shards=1))
                told.append(ref)
            await producer.flush()
            await asyncio.sleep(0.2)  # a rhythm, not a synchronisation

    disturbing = asyncio.create_task(disturb())
    try:
        yield malformed, told
    finally:
        disturbing.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await disturbing
        finally:
            await producer.stop()


_NO_HINTS: tuple[bytes, ...] = (
    b"",
    b"\xff" * 40,
    b"[]",
    b"[" * 3000,
    b'{"v": 2}',
    b'{"v": 1, "run": 5}',
    b"x" * 900_000,
)


def _variants(rng: random.Random, refs: Sequence[RunRef]) -> list[RunRef]:
    """The same hints again; stale, early and far ones; ones of another tenant, of no run, of another instant."""
    found: list[RunRef] = []
    for ref in refs:
        elsewhere = ref.scheduled_for + timedelta(milliseconds=1)
        found += [ref] * rng.randint(1, 3)
        found.append(
            rng.choice(
                [
                    replace(ref, fire_after=ref.fire_after - timedelta(hours=1)),
                    replace(ref, fire_after=ref.fire_after - timedelta(milliseconds=700)),
                    replace(ref, fire_after=ref.fire_after + timedelta(seconds=1)),
                    replace(ref, fire_after=ref.fire_after + timedelta(days=400)),
                    replace(ref, tenant_id=TenantId(uuid4())),
                    replace(ref, id=run_id(ScheduleId(uuid4()), ref.scheduled_for)),
                    replace(ref, id=run_id(ScheduleId(UUID(int=1)), elsewhere), scheduled_for=elsewhere),
                ]
            )
        )
    rng.shuffle(found)
    return found


async def _some_runs(pool: Pool, count: int) -> list[RunRef]:
    rows = await pool.fetch(
        """SELECT id, tenant_id, scheduled_for, fire_after FROM job_run
            WHERE get_byte(uuid_send(id), 6) >> 4 = 8 ORDER BY random() LIMIT $1""",
        count,
    )
    return [RunRef(RunId(row[0]), TenantId(row[1]), row[2], row[3]) for row in rows]


async def _busiest_tenant(conn: Connection) -> int:
    """The most attempts that one tenant had under way on one replica at one instant, by their evidence."""
    found: int = await conn.fetchval(
        """SELECT max(under_way)
             FROM (SELECT sum(step) OVER (PARTITION BY worker, tenant_id ORDER BY at, step) AS under_way
                     FROM run_attempt
                    CROSS JOIN LATERAL (VALUES (started_at, 1), (finished_at, -1)) AS edge(at, step)) AS walk"""
    )
    return found
