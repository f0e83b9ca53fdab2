"""For people: what the broker says of the topic, and how far the group is behind.

Changes nothing, unless the broker is one that makes a topic as soon as somebody asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from app.claim.kafka.calls import asked, started, stop_admin, stop_consumer, stop_producer
from app.claim.kafka.clients import connection, partitions_of, start_producer
from app.settings import KafkaSettings

CLIENT = "carillon-doctor"


@dataclass(frozen=True, slots=True)
class TopicState:
    """`partitions` is 0 when there is no topic; `lag` are the group's hints that are not used yet, early ones too."""

    partitions: int
    lag: int


async def look_at_topic(settings: KafkaSettings) -> TopicState:
    """Ask the broker, without joining the group. Raises TopicUnavailable when it does not answer, ConfigError when it
    refuses us or lacks what a replica would ask of it."""
    admin = AIOKafkaAdminClient(client_id=CLIENT, **connection(settings))
    await started(admin, "look at the topic", stop=stop_admin)
    try:
        async with asked("look at the topic"):
            partitions = await partitions_of(admin, settings.topic)
    finally:
        await stop_admin(admin)
    await stop_producer(await start_producer(settings, client_id=CLIENT))
    return TopicState(partitions, await _lag(settings, partitions) if partitions else 0)


async def _lag(settings: KafkaSettings, partitions: int) -> int:
    consumer = AIOKafkaConsumer(
        client_id=CLIENT, group_id=settings.group, enable_auto_commit=False, **connection(settings)
    )
    await started(consumer, "look at the lag", stop=stop_consumer)
    try:
        async with asked("look at the lag"):
            every = [TopicPartition(settings.topic, number) for number in range(partitions)]
            consumer.assign(every)
            ends = await consumer.end_offsets(every)
            lag = 0
            for one in every:
                committed = await consumer.committed(one)
                lag += 0 if committed is None else max(0, ends[one] - committed)
    finally:
        await stop_consumer(consumer)
    return lag
