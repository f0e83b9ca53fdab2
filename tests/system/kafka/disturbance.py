"""What nobody should write onto the topic, written onto it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import UUID, uuid4

from aiokafka import AIOKafkaProducer

from app.claim.kafka.hint import encode
from app.domain.ids import RunId, ScheduleId, TenantId, run_id
from app.domain.run import RunRef
from app.store.pool import Pool
from tests.brokers import BrokerPlace

EVERY = 0.2


@dataclass(slots=True)
class Disturbance:
    """How many messages were written: those that are no hints, and hints, true or not."""

    malformed: int = 0
    told: int = 0


@asynccontextmanager
async def disturbed(pool: Pool, place: BrokerPlace) -> AsyncIterator[Disturbance]:
    """While the block runs, write what is no hint, and hints that are true, but repeated, or nearly true."""
    rng = random.Random(5)
    done = Disturbance()
    producer = AIOKafkaProducer(bootstrap_servers=place.bootstrap)
    await producer.start()

    async def disturb() -> None:
        while True:
            for key, value in [(None, b"no key"), *((uuid4().bytes, value) for value in _NO_HINTS)]:
                await producer.send(place.topic, key=key, value=value)
                done.malformed += 1
            for ref in _variants(rng, await _some_runs(pool, 300)):
                key, value = encode(ref, shards=1)
                await producer.send(place.topic, key=key, value=value)
                done.told += 1
            await producer.flush()
            await asyncio.sleep(EVERY)  # a rhythm, not a synchronisation

    disturbing = asyncio.create_task(disturb())
    try:
        yield done
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
