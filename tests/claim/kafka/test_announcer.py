"""From the planner to the topic: `put` never waits, the queue is bounded, and every hint is sent or counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.claim.kafka import announcer
from app.claim.kafka.announcer import BATCH, Announcer
from app.claim.kafka.calls import TopicUnavailable
from app.claim.kafka.hint import decode
from app.claim.kafka.topic import HintTopic
from app.domain.ids import ScheduleId, TenantId, run_id
from app.domain.run import RunRef
from app.errors import CarillonError, ConfigError
from app.settings import KafkaSettings
from tests.brokers import OwnBroker, place_on
from tests.claim.kafka.tally import Tally
from tests.eventually import eventually
from tests.ports import quiet_port

START = datetime(2026, 1, 1, tzinfo=UTC)
AGES = timedelta(days=1)

Send = Callable[[Sequence[tuple[bytes, bytes]]], Awaitable[None]]


def refs(count: int, *, begin: int = 0) -> list[RunRef]:
    return [a_ref(number) for number in range(begin, begin + count)]


def a_ref(number: int) -> RunRef:
    at = START + timedelta(milliseconds=number)
    return RunRef(run_id(ScheduleId(UUID(int=1)), at), TenantId(UUID(int=1 + number % 3)), at, at)


class Wire(HintTopic):
    """A topic whose sending is what the test makes of it. `sent` are the runs told of."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings(bootstrap="127.0.0.1:9"), client_id="tests")
        self.sent: list[RunRef] = []
        self.sizes: list[int] = []
        self.answers: list[BaseException] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        await self.gate.wait()
        self.sizes.append(len(messages))
        if self.answers:
            raise self.answers.pop(0)
        self.sent += [decode(key, value) for key, value in messages]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """The rests after failures; they take no time."""
    rests: list[timedelta] = []

    async def note(rest: timedelta, ending: asyncio.Event) -> bool:
        rests.append(rest)
        await asyncio.sleep(0)
        return ending.is_set()

    monkeypatch.setattr(announcer, "sleep_or_stop", note)
    return rests


@asynccontextmanager
async def announcing(
    topic: HintTopic, *, capacity: int = 10_000, keep: timedelta = AGES, shards: int = 1
) -> AsyncIterator[Announcer]:
    """Runs in a task of its own; at the end it is told to end, and must."""
    made = Announcer(topic, capacity=capacity, shards=shards, keep=keep)
    running = asyncio.create_task(made.run())
    try:
        yield made
    except BaseException:
        running.cancel()
        await asyncio.wait([running])
        raise
    made.end()
    async with asyncio.timeout(20):
        await running


async def test_what_is_put_is_sent_in_order_and_in_bounded_batches(wire: Wire, tally: Tally) -> None:
    told = refs(3 * BATCH + 7)
    async with announcing(wire) as made:
        made.put(told[:10])
        made.put([])
        made.put(told[10:])
    assert wire.sent == told
    assert max(wire.sizes) <= BATCH
    assert (tally("sent"), tally("lost"), tally("dropped")) == (len(told), 0, 0)


async def test_a_tenants_hints_are_spread_over_the_shards(wire: Wire) -> None:
    keys: set[bytes] = set()
    send = wire.send

    async def note(messages: Sequence[tuple[bytes, bytes]]) -> None:
        keys.update(key for key, _ in messages)
        await send(messages)

    wire.send = note  # type: ignore[method-assign]
    async with announcing(wire, shards=4) as made:
        made.put(refs(300))
    assert len(keys) == 3 * 4


async def test_put_returns_at_once_while_nothing_can_be_sent(wire: Wire, tally: Tally) -> None:
    """It is no coroutine: there is nothing in it to wait for. What does not fit is counted, the oldest stay."""
    wire.gate.clear()
    async with announcing(wire, capacity=1000) as made:
        made.put(refs(5))
        await eventually(lambda: len(made) == 0)  # these are under way
        made.put(refs(900, begin=5))
        made.put(refs(300, begin=905))
        made.put(refs(50, begin=1205))
        assert len(made) == 1000
        assert tally("dropped") == 250
        assert tally("sent") == 0
        wire.gate.set()
        await eventually(lambda: len(made) == 0)
        made.put(refs(1, begin=2000))
    assert wire.sent == [*refs(1005), *refs(1, begin=2000)]
    assert (tally("sent"), tally("lost"), tally("dropped")) == (1006, 0, 250)


@pytest.mark.parametrize(
    "error",
    [
        TopicUnavailable("away"),
        ConfigError("no"),
        CarillonError("?"),
        RuntimeError("?"),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_goes_wrong_costs_one_batch_and_a_rest(
    wire: Wire, tally: Tally, no_rest: list[timedelta], error: BaseException
) -> None:
    wire.answers = [error, error]
    async with announcing(wire) as made:
        made.put(refs(4 * BATCH))
        await eventually(lambda: len(wire.sizes) == 4)
    assert wire.sent == refs(2 * BATCH, begin=2 * BATCH)
    assert (tally("sent"), tally("lost")) == (2 * BATCH, 2 * BATCH)
    assert no_rest == [announcer.REST, announcer.REST]


async def test_hints_that_waited_too_long_are_not_sent(
    wire: Wire, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(announcer, "boottime", lambda: now)
    wire.gate.clear()
    async with announcing(wire, keep=timedelta(seconds=50)) as made:
        made.put(refs(1))
        await eventually(lambda: len(made) == 0)
        made.put(refs(30, begin=1))
        now += 40
        made.put(refs(10, begin=31))
        now += 40
        wire.gate.set()
    assert wire.sent == [*refs(1), *refs(10, begin=31)]
    assert (tally("sent"), tally("lost")) == (11, 30)


async def test_at_the_end_it_sends_what_is_left(wire: Wire) -> None:
    async with announcing(wire) as made:
        made.put(refs(2 * BATCH + 1))
    assert len(wire.sent) == 2 * BATCH + 1


async def test_at_the_end_it_does_not_wait_for_a_broker_that_is_away(wire: Wire, tally: Tally) -> None:
    """It would rest for seconds otherwise: the end of the test waits for its end."""
    wire.answers = [TopicUnavailable("away")] * 10
    async with announcing(wire) as made:
        made.put(refs(5 * BATCH))
        await eventually(lambda: len(wire.sizes) == 1)
    assert wire.sent == []
    assert len(wire.sizes) == 1, "the rest was cut short"
    assert tally("lost") == BATCH


@pytest.mark.parametrize("amount", [0, 1], ids=["waiting", "sending"])
async def test_it_can_be_cancelled_whatever_it_is_doing(wire: Wire, amount: int) -> None:
    wire.gate.clear()
    made = Announcer(wire, capacity=10, shards=1, keep=AGES)
    running = asyncio.create_task(made.run())
    made.put(refs(amount))
    await eventually(lambda: len(made) == 0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_broker_that_is_not_there_costs_hints_and_holds_nobody_up(
    tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    topic = HintTopic(KafkaSettings(bootstrap=f"127.0.0.1:{quiet_port()}"), client_id="tests")
    async with announcing(topic, capacity=100) as made:
        made.put(refs(80))
        await eventually(lambda: tally("lost") == 80)
        made.put(refs(200))
        assert (len(made), tally("dropped")) == (100, 100)
    await topic.close()


async def test_hints_are_sent_again_after_the_broker_was_silent(
    own_broker: OwnBroker, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    place = place_on(own_broker.server)
    settings = KafkaSettings(
        bootstrap=place.bootstrap, topic=place.topic, idempotence=place.server.has_idempotence
    )
    topic = HintTopic(settings, client_id="tests")
    async with announcing(topic) as made:
        made.put(refs(10))
        await eventually(lambda: tally("sent") == 10)
        own_broker.freeze()
        made.put(refs(20))
        await eventually(lambda: tally("lost") == 20)
        own_broker.thaw()
        made.put(refs(30))
        await eventually(lambda: tally("sent") == 40, within=timedelta(seconds=60))
    await topic.close()
