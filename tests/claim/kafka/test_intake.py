"""From the topic to the buffer: what is no hint holds nothing up, and no failure of the broker ends the receiving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from app.claim.kafka import intake
from app.claim.kafka.buffer import HintBuffer
from app.claim.kafka.calls import TopicUnavailable
from app.claim.kafka.intake import FARTHEST, Intake
from app.claim.load import TenantLoad
from app.domain.ids import ScheduleId, TenantId, run_id
from app.domain.run import RunRef
from app.errors import ConfigError, StoreUnavailable
from app.loops import Wake
from tests.claim.kafka.feed import Feed
from tests.claim.kafka.tally import Tally
from tests.eventually import eventually

START = datetime(2026, 1, 1, tzinfo=UTC)
KEEP = timedelta(seconds=50)
SECOND = timedelta(seconds=1)


def a_ref(number: int, *, due: timedelta = timedelta()) -> RunRef:
    at = START + timedelta(milliseconds=number)
    return RunRef(run_id(ScheduleId(UUID(int=1)), at), TenantId(UUID(int=1 + number % 3)), at, START + due)


@dataclass
class Rig:
    """An intake, what it stands on, and the database's clock; None is a database that is away."""

    feed: Feed = field(default_factory=Feed)
    buffer: HintBuffer = field(default_factory=lambda: HintBuffer(1000))
    arrived: Wake = field(default_factory=Wake)
    now: datetime | None = START

    def __post_init__(self) -> None:
        self.intake = Intake(self.feed, self.buffer, self.arrived, clock=self.clock, keep=KEEP)

    async def clock(self) -> datetime:
        if self.now is None:
            raise StoreUnavailable("away")
        return self.now

    def take_all(self) -> list[RunRef]:
        return self.buffer.take(START + timedelta(days=9000), 10_000, TenantLoad(slots=10_000, cap=10_000))


@asynccontextmanager
async def receiving(rig: Rig) -> AsyncIterator[Rig]:
    running = asyncio.create_task(rig.intake.run())
    try:
        yield rig
        assert not running.done(), "it goes on whatever happens"
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits after every turn and hardly rests."""
    monkeypatch.setattr(intake, "TIDY_EVERY", 0.0)
    monkeypatch.setattr(intake, "REST_FIRST", 0.001)
    monkeypatch.setattr(intake, "REST_CAP", 0.002)


async def test_hints_reach_the_buffer_and_ring(tally: Tally) -> None:
    refs = [a_ref(number) for number in range(5)]
    async with receiving(Rig()) as rig:
        rig.feed.put(*refs)
        await rig.arrived.wait(timedelta(seconds=20), stop=asyncio.Event())
        await eventually(lambda: len(rig.buffer) == 5)
        assert sorted(rig.take_all(), key=lambda ref: ref.id) == refs
    assert tally("received") == 5


async def test_nothing_is_committed_before_it_was_used_and_only_what_has_moved() -> None:
    first, second, third = (a_ref(number) for number in range(3))
    async with receiving(Rig()) as rig:
        rig.feed.put(first, second, third)
        rig.feed.put(a_ref(9), partition=2)
        await eventually(lambda: rig.feed.committed == {0: 0, 2: 0})
        taken = rig.take_all()
        await _turns(rig, 3)
        assert rig.feed.committed == {0: 0, 2: 0}, "taken is not used"
        rig.buffer.used([first, third])
        await eventually(lambda: rig.feed.committed[0] == 1)
        rig.buffer.used([ref for ref in taken if ref not in (first, third)])
        await eventually(lambda: rig.feed.committed == {0: 3, 2: 1})
        commits = len(rig.feed.commits)
        await _turns(rig, 5)
        assert len(rig.feed.commits) == commits
    assert all(commit for commit in rig.feed.commits)


async def test_positions_are_committed_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "COMMIT_AGAIN_AFTER", 0.0)
    async with receiving(Rig()) as rig:
        rig.feed.put(a_ref(1))
        await eventually(lambda: rig.feed.commits[3:])
    assert all(commit == {0: 0} for commit in rig.feed.commits)


async def test_what_is_no_hint_is_counted_told_of_once_and_passed_over(
    tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    good = a_ref(1)
    rig = Rig()
    for number in range(200):
        rig.feed.put_raw(b"key", b"value %d" % number)
    rig.feed.put_raw(None, None)
    rig.feed.put(good)
    rig.feed.put_raw(b"", b"")
    async with receiving(rig):
        await eventually(lambda: len(rig.buffer) == 1)
        rig.buffer.used(rig.take_all())
        await eventually(lambda: rig.feed.committed == {0: 203})
    assert (tally("received"), tally("malformed")) == (1, 202)
    [record] = [record for record in caplog.records if record.message == "kafka.malformed"]
    assert record.__dict__["messages"] == 202
    assert record.__dict__["first"].startswith("partition 0, offset 0: ")


async def test_a_hint_for_a_far_time_is_passed_over_and_one_for_a_near_time_is_kept(tally: Tally) -> None:
    """Waited for, it would hold its partition's position for years."""
    near, far = a_ref(1, due=FARTHEST - SECOND), a_ref(2, due=FARTHEST + SECOND)
    async with receiving(Rig()) as rig:
        rig.feed.put(far, near, far)
        await eventually(lambda: rig.feed.committed == {0: 1})
        assert rig.take_all() == [near]
    assert (tally("received"), tally("malformed")) == (1, 2)


async def test_old_hints_are_given_up_unasked_and_committed(tally: Tally) -> None:
    old, young = a_ref(1), a_ref(2, due=2 * SECOND)
    async with receiving(Rig()) as rig:
        rig.feed.put(old, young)
        await eventually(lambda: len(rig.buffer) == 2)
        rig.now = START + KEEP + SECOND
        await eventually(lambda: rig.feed.committed == {0: 1})
        assert rig.take_all() == [young]
    assert tally("stale") == 1


async def test_while_the_database_is_away_hints_are_received_and_none_is_given_up(tally: Tally) -> None:
    async with receiving(Rig(now=None)) as rig:
        rig.feed.put(a_ref(1), a_ref(2, due=timedelta(days=1000)))
        await eventually(lambda: len(rig.buffer) == 2)
        await _turns(rig, 3)
        assert rig.feed.committed == {0: 0}
    assert (tally("received"), tally("malformed"), tally("stale")) == (2, 0, 0)


async def test_a_full_buffer_holds_the_partitions_back_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "RECEIVE_BATCH", 10)
    refs = [a_ref(number) for number in range(100)]
    async with receiving(Rig(buffer=HintBuffer(20))) as rig:
        rig.feed.put(*refs)
        seen: list[RunRef] = []
        while len(seen) < 100:
            await eventually(lambda: rig.feed.is_held_back or not rig.feed.waiting)
            await _turns(rig, 2)
            assert len(rig.buffer) <= 20 + 10
            taken = rig.take_all()
            seen += taken
            rig.buffer.used(taken)
        await eventually(lambda: rig.feed.committed == {0: 100})
        assert not rig.feed.is_held_back
    assert sorted(seen, key=lambda ref: ref.scheduled_for) == refs


async def test_while_held_back_it_goes_on_polling() -> None:
    """A consumer that does not poll is taken for dead."""
    async with receiving(Rig(buffer=HintBuffer(1))) as rig:
        rig.feed.put(a_ref(1))
        await eventually(lambda: rig.feed.is_held_back)
        await _turns(rig, 5)


async def test_partitions_that_went_to_somebody_else_are_not_committed() -> None:
    async with receiving(Rig()) as rig:
        rig.feed.put(a_ref(1), partition=0)
        rig.feed.put(a_ref(2), partition=1)
        await eventually(lambda: rig.feed.committed == {0: 0, 1: 0})
        rig.feed.partitions = {1}
        commits = len(rig.feed.commits)
        rig.buffer.used(rig.take_all())
        await eventually(lambda: rig.feed.committed == {0: 0, 1: 1})
        assert rig.feed.commits[commits:] == [{1: 1}]


async def test_after_a_rebalance_only_what_was_received_since_is_committed() -> None:
    """The topic may have been made anew meanwhile: an old position would skip what is on it now."""
    old, again = a_ref(1), a_ref(2)
    async with receiving(Rig()) as rig:
        rig.feed.ends = {0: 500}
        rig.feed.put(old)
        await eventually(lambda: rig.feed.committed == {0: 500})
        rig.feed.rounds += 1
        rig.feed.ends = {0: 3}
        commits = len(rig.feed.commits)
        rig.buffer.used(rig.take_all())
        await _turns(rig, 3)
        assert len(rig.feed.commits) == commits
        rig.feed.put(again, old)
        await eventually(lambda: rig.feed.committed == {0: 3})
        rig.buffer.used(rig.take_all())
        await eventually(lambda: rig.feed.committed == {0: 5})


@pytest.mark.parametrize(
    "error",
    [TopicUnavailable("away"), ConfigError("refused"), RuntimeError("?"), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_the_broker_does_it_receives_again_after_a_rest(
    error: BaseException, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig = Rig()
    rig.feed.answers = [error] * 3
    async with receiving(rig):
        rig.feed.put(a_ref(1))
        await eventually(lambda: len(rig.buffer) == 1)
    assert rig.feed.count("stop") == 3, "it leaves the group and joins again"
    assert tally.errors("receive") == 3
    assert len(caplog.records) == 3


async def test_a_failed_commit_is_told_of_and_repeated(
    tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig = Rig()
    rig.feed.commit_answers = [TopicUnavailable("rebalancing"), TopicUnavailable("rebalancing")]
    async with receiving(rig):
        rig.feed.put(a_ref(1))
        await eventually(lambda: rig.feed.committed == {0: 0})
    assert rig.feed.count("stop") == 0
    assert tally.errors("commit") == 2


async def test_at_the_end_it_commits_what_was_used_and_leaves_the_group() -> None:
    async with receiving(Rig()) as rig:
        rig.feed.put(a_ref(1), a_ref(2))
        await eventually(lambda: rig.feed.committed == {0: 0})
        rig.feed.answers = [TopicUnavailable("away")] * 100
        await eventually(lambda: rig.feed.count("stop"))
    rig.buffer.used(rig.take_all()[:1])
    await rig.intake.leave()
    assert rig.feed.committed == {0: 1}
    assert rig.feed.calls[-2:] == ["commit", "stop"]


async def test_a_last_commit_that_fails_does_not_keep_it_from_leaving() -> None:
    rig = Rig()
    async with receiving(rig):
        rig.feed.put(a_ref(1))
        await eventually(lambda: rig.feed.committed == {0: 0})
    rig.buffer.used(rig.take_all())
    rig.feed.commit_answers = [TopicUnavailable("away")]
    await rig.intake.leave()
    assert rig.feed.calls[-1] == "stop"


async def _turns(rig: Rig, count: int) -> None:
    before = rig.feed.count("receive")
    await eventually(lambda: rig.feed.count("receive") >= before + count)
