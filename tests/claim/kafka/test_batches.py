"""Hints in batches: where each goes is every client's choice, and none is lost when a batch is full."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.partitioner import DefaultPartitioner
from hypothesis import given
from hypothesis import strategies as st

from app.claim.kafka import batches
from app.claim.kafka.topic import HintTopic
from app.settings import KafkaSettings
from tests.brokers import BrokerPlace

PARTITIONS = 3


@given(st.binary(max_size=40), st.integers(1, 50))
def test_a_key_has_the_partition_that_every_client_gives_it(key: bytes, partitions: int) -> None:
    every = list(range(partitions))
    assert batches._hash(key) % partitions == DefaultPartitioner()(key, every, every)


async def test_more_than_fits_into_one_batch_arrives_in_order_on_the_partition_of_its_key(
    broker: BrokerPlace,
) -> None:
    settings = KafkaSettings(
        bootstrap=broker.bootstrap,
        topic=broker.topic,
        partitions=PARTITIONS,
        idempotence=broker.server.has_idempotence,
    )
    sent = [(f"key {number % 2}".encode(), b"%d %s" % (number, b"x" * 120)) for number in range(2_000)]
    topic = HintTopic(settings, client_id="tests")
    try:
        await topic.send(sent)
        await topic.send([(b"key 0", b"the last")])
    finally:
        await topic.close()
    received = await _all_messages(broker, count=len(sent) + 1)
    for key in (b"key 0", b"key 1"):
        places = {partition for partition, one, _ in received if one == key}
        assert places == {batches._hash(key) % PARTITIONS}
        expected = [value for one, value in [*sent, (b"key 0", b"the last")] if one == key]
        assert [value for _, one, value in received if one == key] == expected


async def _all_messages(place: BrokerPlace, *, count: int) -> list[tuple[int, bytes, bytes]]:
    """Partition, key and value of so many messages, without a group."""
    consumer = AIOKafkaConsumer(bootstrap_servers=place.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([TopicPartition(place.topic, number) for number in range(PARTITIONS)])
        found: list[tuple[int, bytes, bytes]] = []
        while len(found) < count:
            message = await consumer.getone()
            found.append((message.partition, message.key, message.value))
        return found
    finally:
        await consumer.stop()
