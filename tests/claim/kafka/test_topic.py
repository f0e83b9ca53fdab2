"""The topic of hints on real brokers, on each kind in turn: what is sent arrives, what was not committed comes again,
and a broker that is away or silent is an answer, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from app.claim.kafka import calls
from app.claim.kafka.calls import TopicUnavailable
from app.claim.kafka.state import TopicState, look_at_topic
from app.claim.kafka.topic import HintTopic, Message
from app.errors import ConfigError
from app.settings import KafkaSettings
from tests.brokers import BrokerPlace, OwnBroker, place_on
from tests.eventually import eventually
from tests.ports import quiet_port

PATIENCE = timedelta(seconds=60)
"""For what a broker decides: the embedded one takes up to 14 s to give a dead member's partitions to another."""
PARTITIONS = 6
WITHIN = timedelta(milliseconds=200)

Open = Callable[..., AbstractAsyncContextManager[HintTopic]]


def settings_for(place: BrokerPlace, **changes: Any) -> KafkaSettings:
    base: dict[str, Any] = {
        "bootstrap": place.bootstrap,
        "topic": place.topic,
        "group": place.group,
        "partitions": PARTITIONS,
        "idempotence": place.server.has_idempotence,
    }
    return KafkaSettings(**(base | changes))


@asynccontextmanager
async def opened(place: BrokerPlace, **changes: Any) -> AsyncIterator[HintTopic]:
    """A topic as one replica has it; closed in the end."""
    settings = settings_for(place, **changes)
    topic = HintTopic(settings, client_id="tests", session=place.server.shortest_session)
    try:
        yield topic
    finally:
        await topic.close()


@pytest.fixture
def replica(broker: BrokerPlace) -> Open:
    """Open the test's topic as one more replica."""
    return partial(opened, broker)


def numbered(count: int, *, keys: int = 5) -> list[tuple[bytes, bytes]]:
    return [(f"key {number % keys}".encode(), str(number).encode()) for number in range(count)]


async def joined(topic: HintTopic, *, partitions: int = PARTITIONS) -> list[Message]:
    """Poll until the topic owns so many partitions and has settled in; what arrived meanwhile."""
    received: list[Message] = []

    async def probe() -> bool:
        owned_before = len(topic.owned())
        received.extend(await topic.receive(1000, within=WITHIN))
        return owned_before == len(topic.owned()) == partitions

    await eventually(probe, within=PATIENCE)
    return received


async def received_by(topic: HintTopic, count: int) -> list[Message]:
    """Receive until there are at least so many messages."""
    received: list[Message] = []

    async def probe() -> bool:
        received.extend(await topic.receive(1000, within=WITHIN))
        return len(received) >= count

    await eventually(probe, within=PATIENCE)
    return received


async def send_singly(topic: HintTopic, messages: Sequence[tuple[bytes, bytes]]) -> None:
    """Each in a batch of its own. Tansu counts batches where it is asked for the end of a partition."""
    for message in messages:
        await topic.send([message])


def values(messages: Sequence[Message]) -> list[int]:
    return sorted(int(message.value or b"") for message in messages)


def after(messages: Sequence[Message]) -> dict[int, int]:
    """The positions behind these messages."""
    return {message.partition: message.offset + 1 for message in messages}


async def test_a_missing_topic_is_made_once_with_its_partitions(replica: Open) -> None:
    async with replica() as one, replica() as other:
        assert {*await asyncio.gather(one.ensure(), other.ensure())} == {PARTITIONS}
        assert await one.ensure() == PARTITIONS


async def test_a_topic_with_fewer_partitions_is_used_and_told_of(
    replica: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(partitions=2) as maker, replica() as user:
        await maker.ensure()
        assert caplog.records == []
        assert await user.ensure() == 2
        assert [record.message for record in caplog.records] == ["kafka.fewer_partitions"]


async def test_a_topic_that_may_not_be_made_must_be_there(broker: BrokerPlace, replica: Open) -> None:
    async with replica(create_topic=False) as user:
        if broker.server.makes_topics_unasked:
            assert await user.ensure() > 0
            return
        with pytest.raises(ConfigError, match=r"SCHEDULER_KAFKA_TOPIC: there is no topic hints-\w+, and"):
            await user.ensure()
        async with replica() as maker:
            await maker.ensure()
        assert await user.ensure() == PARTITIONS


async def test_what_is_sent_arrives_in_the_order_of_its_key_on_one_partition(replica: Open) -> None:
    sent = numbered(500)
    async with replica() as topic:
        await joined(topic)
        await topic.send(sent)
        received = await received_by(topic, len(sent))
    assert values(received) == list(range(500))
    for key in {key for key, _ in sent}:
        of_key = [message for message in received if message.key == key]
        assert len({message.partition for message in of_key}) == 1
        assert [message.value for message in of_key] == [value for one, value in sent if one == key]
        offsets = [message.offset for message in of_key]
        assert offsets == sorted(offsets)


async def test_at_most_so_many_messages_are_received_at_once(replica: Open) -> None:
    async with replica() as topic:
        await joined(topic)
        await topic.send(numbered(100))
        received: list[Message] = []
        sizes: list[int] = []

        async def probe() -> bool:
            part = await topic.receive(7, within=WITHIN)
            sizes.append(len(part))
            received.extend(part)
            return len(received) == 100

        await eventually(probe, within=PATIENCE)
    assert values(received) == list(range(100))
    assert max(sizes) <= 7


async def test_messages_without_key_or_value_arrive_as_they_are(replica: Open) -> None:
    async with replica() as topic:
        await joined(topic)
        await topic.send([(b"", b""), (b"\0\xff", b"not json")])
        received = await received_by(topic, 2)
    assert {(message.key, message.value) for message in received} == {(b"", b""), (b"\0\xff", b"not json")}


async def test_nothing_is_received_while_held_back_and_all_of_it_afterwards(replica: Open) -> None:
    async with replica() as topic:
        await joined(topic)
        topic.hold_back()
        await topic.send(numbered(50))
        for _ in range(5):
            assert await topic.receive(1000, within=WITHIN) == []
        assert len(topic.owned()) == PARTITIONS
        topic.go_on()
        received = await received_by(topic, 50)
    assert values(received) == list(range(50))


async def test_the_next_replica_begins_behind_what_was_committed(replica: Open) -> None:
    async with replica() as first:
        await joined(first)
        await first.send(numbered(100))
        received = await received_by(first, 100)
        done = [message for message in received if int(message.value or b"") < 60]
        open_ones = [message for message in received if message not in done]
        oldest = {one.partition: one.offset for one in reversed(open_ones)}
        await first.commit(after(received) | oldest)
    async with replica() as second:
        again = await received_by(second, len(open_ones))
    assert set(values(open_ones)) <= set(values(again))
    assert {(one.partition, one.offset) for one in again} == {
        (one.partition, one.offset)
        for one in received
        if one.partition in oldest and one.offset >= oldest[one.partition]
    }


async def test_what_was_never_committed_comes_again(replica: Open) -> None:
    async with replica() as first:
        await joined(first)
        await first.send(numbered(100))
        await received_by(first, 100)
    async with replica() as second:
        assert values(await received_by(second, 100)) == list(range(100))


async def test_what_is_sent_while_nobody_receives_is_not_lost_to_a_group_that_was_there(
    replica: Open,
) -> None:
    """A group that has committed nothing begins at the end; where that was is noted when it first gets there."""
    async with replica() as first:
        await joined(first)
    async with replica() as sender:
        await sender.send(numbered(40))
    async with replica() as second:
        assert values(await received_by(second, 40)) == list(range(40))


async def test_a_group_that_is_new_begins_with_what_is_sent_from_then_on(replica: Open) -> None:
    async with replica() as topic:
        await send_singly(topic, numbered(10))
        assert await joined(topic) == []
        await topic.send([(b"key", b"10")])
        assert values(await received_by(topic, 1)) == [10]


async def test_two_replicas_share_the_partitions_and_each_message_goes_to_one(replica: Open) -> None:
    async with replica() as one, replica() as other:
        await joined(one)
        first_round = one.round

        async def probe() -> bool:
            await asyncio.gather(*(topic.receive(1000, within=WITHIN) for topic in (one, other)))
            return len(one.owned()) == len(other.owned()) == PARTITIONS // 2

        await eventually(probe, within=PATIENCE)
        assert one.round > first_round
        assert not one.owned() & other.owned()
        await one.send(numbered(100, keys=40))
        received: dict[HintTopic, list[Message]] = {one: [], other: []}

        async def collect() -> bool:
            for topic, messages in received.items():
                messages.extend(await topic.receive(1000, within=WITHIN))
            return sum(map(len, received.values())) >= 100

        await eventually(collect, within=PATIENCE)
        assert values([*received[one], *received[other]]) == list(range(100))
        for topic, messages in received.items():
            assert {message.partition for message in messages} <= topic.owned()


async def test_the_partitions_of_a_replica_that_leaves_move_on(replica: Open) -> None:
    async with replica() as staying, replica() as leaving:
        await joined(leaving)

        async def probe() -> bool:
            await asyncio.gather(*(topic.receive(1000, within=WITHIN) for topic in (leaving, staying)))
            return len(staying.owned()) == PARTITIONS // 2

        await eventually(probe, within=PATIENCE)
        await leaving.stop_receiving()
        assert leaving.owned() == set()
        await joined(staying)
        await leaving.send(numbered(20))
        assert values(await received_by(staying, 20)) == list(range(20))


async def test_partitions_that_are_not_ours_are_not_committed(replica: Open) -> None:
    async with replica() as topic:
        await topic.commit({0: 5})  # nothing is ours before the first receive
        await joined(topic)
        await topic.send(numbered(20))
        await received_by(topic, 20)
        await topic.commit({PARTITIONS + 3: 5})
        await topic.commit({})
    async with replica() as again:
        assert values(await received_by(again, 20)) == list(range(20))


async def test_a_group_that_is_said_to_be_behind_the_end_misses_nothing_new(replica: Open) -> None:
    """As it is after its topic was made anew; a broker may answer a read from there with nothing."""
    async with replica() as first:
        await joined(first)
        await first.commit(dict.fromkeys(range(PARTITIONS), 1000))
    async with replica() as second:
        assert await joined(second) == []
        await second.send(numbered(40, keys=20))
        assert values(await received_by(second, 40)) == list(range(40))


async def test_the_lag_is_told_without_joining_the_group(broker: BrokerPlace, replica: Open) -> None:
    async with replica() as topic:
        await joined(topic)
        await send_singly(topic, numbered(30))
        assert await look_at_topic(settings_for(broker)) == TopicState(PARTITIONS, lag=30)
        received = await received_by(topic, 30)
        await topic.commit(after(received))
        assert await look_at_topic(settings_for(broker)) == TopicState(PARTITIONS, lag=0)
        assert len(topic.owned()) == PARTITIONS


async def test_a_look_at_a_missing_topic_does_not_make_it(broker: BrokerPlace) -> None:
    for _ in range(2):
        state = await look_at_topic(settings_for(broker))
        assert (state.partitions == 0) != broker.server.makes_topics_unasked


async def test_a_cancelled_receive_loses_nothing(replica: Open) -> None:
    async with replica() as topic:
        await joined(topic)
        for _ in range(10):
            receiving = asyncio.create_task(topic.receive(1000, within=PATIENCE))
            await asyncio.sleep(0)
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
        await topic.send(numbered(10))
        assert values(await received_by(topic, 10)) == list(range(10))


async def test_a_receive_that_is_cancelled_while_it_opens_leaves_nothing_running(replica: Open) -> None:
    async with replica() as topic:
        await topic.ensure()
        for turns in range(0, 60, 3):
            receiving = asyncio.create_task(topic.receive(1000, within=WITHIN))
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving


async def test_a_broker_that_is_not_there_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    settings = KafkaSettings(bootstrap=f"127.0.0.1:{quiet_port()}")
    topic = HintTopic(settings, client_id="tests")
    calls: list[Callable[[], Any]] = [
        topic.ensure,
        partial(look_at_topic, settings),
        partial(topic.send, numbered(1)),
        partial(topic.receive, 1, within=WITHIN),
    ]
    for call in calls:
        with pytest.raises(TopicUnavailable):
            await call()
    await topic.commit({0: 1})
    topic.hold_back()
    topic.go_on()
    assert topic.owned() == set()
    await topic.close()


async def test_a_cluster_without_a_controller_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for a moment while a broker starts."""
    admin = AIOKafkaAdminClient(bootstrap_servers="127.0.0.1:9")
    topic = HintTopic(KafkaSettings(bootstrap="127.0.0.1:9"), client_id="tests")

    async def nothing() -> None:
        """The metadata that came names no controller."""

    monkeypatch.setattr(admin._client, "force_metadata_update", nothing)
    with pytest.raises(TopicUnavailable, match="no controller yet"):
        await topic._create(admin)


async def test_a_producer_the_broker_cannot_have_is_refused_with_the_setting_to_change(
    broker: BrokerPlace, replica: Open
) -> None:
    async with replica(idempotence=True) as topic:
        if broker.server.has_idempotence:
            await topic.send(numbered(1))
        else:
            with pytest.raises(ConfigError, match="SCHEDULER_KAFKA_IDEMPOTENCE=false"):
                await topic.send(numbered(1))


async def test_hints_flow_again_after_the_broker_was_away(own_broker: OwnBroker) -> None:
    async with opened(place_on(own_broker.server)) as topic:
        await joined(topic)
        await own_broker.halt()
        with pytest.raises(TopicUnavailable):
            await topic.send(numbered(1))
        with pytest.raises(TopicUnavailable):
            await topic.ensure()
        assert await topic.receive(1000, within=WITHIN) == []
        await own_broker.resume()
        await flows_again(topic)


async def test_a_receiver_that_was_opened_anew_while_the_broker_was_away_goes_on_where_it_was(
    own_broker: OwnBroker,
) -> None:
    async with opened(place_on(own_broker.server)) as topic:
        await joined(topic)
        await topic.send(numbered(20))
        await own_broker.halt()
        await topic.stop_receiving()
        with pytest.raises(TopicUnavailable):
            await topic.receive(1000, within=WITHIN)
        await own_broker.resume()
        if own_broker.keeps_data:
            assert values(await received_by(topic, 20)) == list(range(20))
        else:
            await flows_again(topic)


async def test_a_silent_broker_holds_nobody_up_for_ever(
    own_broker: OwnBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CALL_WITHIN", timedelta(seconds=1.5))
    async with opened(place_on(own_broker.server)) as topic:
        received = await joined(topic)
        await topic.send(numbered(1))
        received += await received_by(topic, 1)
        own_broker.freeze()
        with pytest.raises(TopicUnavailable, match="did not answer in time"):
            await topic.send(numbered(1))
        with pytest.raises(TopicUnavailable, match="did not answer in time"):
            await topic.commit(after(received))
        with pytest.raises(TopicUnavailable, match="did not answer in time"):
            await topic.ensure()
        assert await topic.receive(1000, within=WITHIN) == []
        await topic.close()
        own_broker.thaw()
        monkeypatch.undo()
        await flows_again(topic)


async def test_a_commit_that_is_given_up_at_the_end_of_its_round_leaves_no_error_behind(
    own_broker: OwnBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka goes on with it in a task of its own, whose failure is nobody's."""
    monkeypatch.setattr(calls, "STOP_WITHIN", timedelta(seconds=0.5))
    async with opened(place_on(own_broker.server)) as topic:
        await joined(topic)
        own_broker.freeze()
        with pytest.raises(TopicUnavailable):
            await topic.commit(dict.fromkeys(range(PARTITIONS), 0), within=WITHIN)
        await topic._end_commit()
    own_broker.thaw()


async def flows_again(topic: HintTopic) -> None:
    """Send one message after the other until one is received; each may fail until the clients have recovered."""
    number = 1000

    async def probe() -> bool:
        nonlocal number
        number += 1
        with contextlib.suppress(TopicUnavailable):
            await topic.send([(b"key", str(number).encode())])
        with contextlib.suppress(TopicUnavailable):
            return any(
                int(message.value or b"") > 1000 for message in await topic.receive(1000, within=WITHIN)
            )
        return False

    await eventually(probe, within=2 * PATIENCE)
