"""The topic of hints as one replica uses it. Everything that waits is bounded; a broker that is away is an answer
(`TopicUnavailable`), never a hang.

aiokafka's ways, each met here: `start` raises at once when no broker answers; `getmany` waits beyond its time for a
group that gives out its partitions anew; a bare `commit()` may speak of partitions that were lost meanwhile
(aio-libs/aiokafka#933), so offsets are always named. For more of them see `calls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from aiokafka import (
    AIOKafkaConsumer,
    AIOKafkaProducer,
    ConsumerRebalanceListener,
    ConsumerRecord,
    TopicPartition,
)
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import for_code

from app.boottime import boottime
from app.claim.kafka.batches import send_in_batches
from app.claim.kafka.calls import (
    TopicUnavailable,
    asked,
    look_at,
    look_at_commits,
    started,
    stop_admin,
    stop_consumer,
    stop_producer,
)
from app.claim.kafka.clients import METADATA_AGE_MS, connection, partitions_of, start_producer
from app.errors import ConfigError
from app.settings import KafkaSettings

logger = logging.getLogger(__name__)

SESSION = timedelta(seconds=10)
"""A member that the broker has not heard of for so long is taken for dead."""
POLL_GAP_MS = 60_000
JOIN_WITHIN = 30.0
"""Seconds a group may take to give out its partitions. After that the consumer is taken for one that never will."""
COMMIT_ENDS_WITHIN = 1.0
"""Seconds for the answer to a commit when its round is over."""
LOOK_AGAIN = 0.05
"""Seconds between two looks for a topic that was just made."""
TOPIC_EXISTS = 36
"""Protocol code TOPIC_ALREADY_EXISTS."""


@dataclass(frozen=True, slots=True)
class Message:
    """One record as it was read; what it says is not known yet."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class _Rounds(ConsumerRebalanceListener):  # type: ignore[misc]  # the client is untyped
    """Counts how often the group has begun to give out its partitions anew, and ends each round with `end_round`."""

    def __init__(self, end_round: Callable[[], Awaitable[None]]) -> None:
        self.count = 0
        self.is_given_out = False
        self._end_round = end_round

    def begin(self) -> None:
        self.count += 1
        self.is_given_out = False

    async def on_partitions_revoked(self, _revoked: list[TopicPartition]) -> None:
        self.begin()
        await self._end_round()

    async def on_partitions_assigned(self, _assigned: list[TopicPartition]) -> None:
        self.is_given_out = True


class HintTopic:
    """One producer and one consumer, each opened when it is needed and again after it broke."""

    def __init__(self, settings: KafkaSettings, *, client_id: str, session: timedelta = SESSION) -> None:
        self._settings = settings
        self._client_id = client_id
        self._session_ms = int(session.total_seconds() * 1000)
        self._producer: AIOKafkaProducer | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._rounds = _Rounds(self._end_commit)
        self._settled_round = 0
        self._joined_at = 0.0
        self._committing: asyncio.Task[None] | None = None

    async def ensure(self) -> int:
        """Make the topic if that is allowed, else look that it is there; its number of partitions.

        Raises ConfigError when it is missing and may not be made, or when the broker refuses who we are;
        TopicUnavailable when no broker answers.
        """
        settings = self._settings
        admin = AIOKafkaAdminClient(client_id=self._client_id, **connection(self._settings))
        await started(admin, "look at the topic", stop=stop_admin)
        try:
            async with asked("look at the topic"):
                if settings.create_topic:
                    await self._create(admin)
                partitions = await partitions_of(admin, settings.topic)
                while settings.create_topic and not partitions:  # made, but not known everywhere yet
                    await asyncio.sleep(LOOK_AGAIN)
                    partitions = await partitions_of(admin, settings.topic)
        finally:
            await stop_admin(admin)
        if not partitions:
            raise ConfigError(
                f"SCHEDULER_KAFKA_TOPIC: there is no topic {settings.topic}, and SCHEDULER_KAFKA_CREATE_TOPIC is "
                f"false; make it with {settings.partitions} partitions, or allow it to be made"
            )
        if partitions < settings.partitions:
            logger.warning(
                "kafka.fewer_partitions",
                extra={"topic": settings.topic, "has": partitions, "wanted": settings.partitions},
            )
        return partitions

    async def open_producer(self) -> AIOKafkaProducer:
        """Get ready to send. Raises ConfigError when the broker lacks what is asked of it, or TopicUnavailable."""
        if self._producer is None:
            await self.ensure()
            self._producer = await start_producer(self._settings, client_id=self._client_id)
        return self._producer

    async def send(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Send hints and wait until the broker has them. Raises TopicUnavailable; some may have arrived then."""
        producer = await self.open_producer()
        try:
            async with asked("send hints"):
                await send_in_batches(producer, self._settings.topic, messages)
        except TopicUnavailable:
            await self._close_producer()
            raise

    @property
    def round(self) -> int:
        """Moves on whenever the partitions are given out anew. What was not committed then is received again, by
        whoever gets its partition, and nothing that was received before says where the reading stands now."""
        return self._rounds.count

    async def receive(self, limit: int, *, within: timedelta) -> list[Message]:
        """At most `limit` messages, in order per partition; none after `within`. Raises TopicUnavailable.

        Called while held back too: a consumer that does not poll is taken for dead. A group that gives out its
        partitions anew delivers nothing meanwhile; that is no failure until it lasts for `JOIN_WITHIN`.
        """
        consumer = await self._open_consumer()
        batches: Mapping[TopicPartition, Sequence[ConsumerRecord]] | None = None
        with contextlib.suppress(TimeoutError):  # its own time does not bound the wait for an assignment
            async with asyncio.timeout(2 * within.total_seconds()), asked("receive hints"):
                batches = await consumer.getmany(
                    timeout_ms=int(within.total_seconds() * 1000), max_records=limit
                )
        if batches is None or not self._rounds.is_given_out:
            # Whatever would be asked now waits behind the question for partitions.
            if boottime() - self._joined_at > JOIN_WITHIN:
                raise TopicUnavailable("receive hints: the group gives out no partitions")
            return []
        this_round = self._rounds.count  # nothing was awaited since the batches were given out
        self._joined_at = boottime()
        try:
            async with asked("begin with partitions"):
                await self._settle_in(consumer, batches)
        except TopicUnavailable:
            if self._rounds.count == this_round:
                raise  # otherwise its questions waited behind that of joining anew
        if self._rounds.count != this_round:
            return []  # not committed, so received again by whoever gets the partitions now
        return [
            Message(partition.partition, record.offset, record.key, record.value)
            for partition, records in batches.items()
            for record in records
        ]

    def hold_back(self) -> None:
        """Receive nothing for a while; the partitions stay ours."""
        if self._consumer is not None:
            self._consumer.pause(*self._consumer.assignment())

    def go_on(self) -> None:
        if self._consumer is not None and (paused := self._consumer.paused()):
            self._consumer.resume(*paused)

    def owned(self) -> set[int]:
        """The partitions that are ours right now."""
        return set() if self._consumer is None else {one.partition for one in self._consumer.assignment()}

    async def commit(self, positions: Mapping[int, int], *, within: timedelta | None = None) -> None:
        """Note how far this group has come, for partitions that are ours. Raises TopicUnavailable; harmless then."""
        consumer = self._consumer
        if consumer is None:
            return
        owned = {one: positions[one.partition] for one in consumer.assignment() if one.partition in positions}
        if not owned:
            return
        if self._committing is not None and not self._committing.done():
            raise TopicUnavailable("commit: the one before is still under way")
        # In a task that is not cut off in the middle: aiokafka's answer to it would be nobody's then.
        self._committing = asyncio.create_task(consumer.commit(owned))
        self._committing.add_done_callback(look_at)
        async with asked("commit", within=within):
            await asyncio.shield(self._committing)

    async def stop_receiving(self) -> None:
        """Leave the group, so that the partitions move on at once."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer)
        await self._end_commit()

    async def close(self) -> None:
        await self.stop_receiving()
        await self._close_producer()

    async def _create(self, admin: AIOKafkaAdminClient) -> None:
        settings = self._settings
        new = NewTopic(
            settings.topic,
            settings.partitions,
            settings.replication,
            topic_configs={"retention.ms": str(int(settings.retention.total_seconds() * 1000))},
        )
        try:
            answer = await admin.create_topics([new])
        except AttributeError:  # aiokafka's way of saying so, while a broker starts
            raise TopicUnavailable("make the topic: the cluster has no controller yet") from None
        for name, code, *_ in answer.topic_errors:
            if code not in (0, TOPIC_EXISTS):
                raise for_code(code)(f"topic {name}")

    async def _open_consumer(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            await self.ensure()
            consumer = AIOKafkaConsumer(
                client_id=self._client_id,
                group_id=self._settings.group,
                enable_auto_commit=False,
                auto_offset_reset="latest",
                session_timeout_ms=self._session_ms,
                heartbeat_interval_ms=self._session_ms // 5,
                max_poll_interval_ms=POLL_GAP_MS,
                metadata_max_age_ms=METADATA_AGE_MS,
                request_timeout_ms=self._session_ms + 10_000,
                **connection(self._settings),
            )
            try:
                async with asked("open the consumer"):
                    # Without topics: it would wait for an assignment, which takes seconds.
                    await consumer.start()
            except BaseException:
                await stop_consumer(consumer)
                raise
            look_at_commits(consumer)
            self._rounds.begin()
            consumer.subscribe([self._settings.topic], listener=self._rounds)
            self._joined_at = boottime()
            self._consumer = consumer
        return self._consumer

    async def _settle_in(
        self, consumer: AIOKafkaConsumer, batches: Mapping[TopicPartition, Sequence[ConsumerRecord]]
    ) -> None:
        """At the beginning of a round: commit where a partition begins for a group that never had it, because `latest`
        must not mean later than now, and go back to its end where the group is said to have come further (a topic made
        anew has ended since: some brokers say nothing, and the next hints would be skipped)."""
        this_round = self._rounds.count
        if self._settled_round == this_round:
            return
        begins: dict[TopicPartition, int] = {}
        ends: dict[TopicPartition, int] = await consumer.end_offsets(list(consumer.assignment()))
        for one, end in ends.items():
            committed = await consumer.committed(one)
            if committed is None:
                received = batches.get(one)
                begins[one] = received[0].offset if received else await consumer.position(one)
            elif committed > end:
                consumer.seek(one, end)
                begins[one] = end
        if begins:
            await consumer.commit(begins)
        self._settled_round = this_round

    async def _end_commit(self) -> None:
        """A commit that is not answered is tried again for ever, in later rounds too: their topic may be another."""
        if self._committing is not None and not self._committing.done():
            await asyncio.wait([self._committing], timeout=COMMIT_ENDS_WITHIN)
            self._committing.cancel()
            await asyncio.wait([self._committing])

    async def _close_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_producer(producer)
