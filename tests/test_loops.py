"""Loops: what a failing, hanging, stray-cancelled or stopped body does to its loop, and what the health says of it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import loops, metrics
from app.loops import BACKOFF_CAP, PATIENCE, Body, Loop, LoopHealth, Wake, backoff, run_loop, sleep_or_stop

BOUND = 20
"""Seconds after which a wait in a test gives up: only ever reached when the test fails."""
LONG = timedelta(hours=1)
SHORT = timedelta(milliseconds=1)


class Least(random.Random):
    """The lower end of every range: no jitter at the start, half of each back-off."""

    def random(self) -> float:
        return 0.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Sleep = Callable[[timedelta, asyncio.Event], Awaitable[bool]]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """The pauses that `run_loop` would have slept; they take no time."""
    asked: list[timedelta] = []

    async def note(pause: timedelta, stop: asyncio.Event) -> bool:
        asked.append(pause)
        await asyncio.sleep(0)
        return stop.is_set()

    monkeypatch.setattr(loops, "sleep_or_stop", note)
    return asked


async def run(loop: Loop, stop: asyncio.Event, health: LoopHealth | None = None) -> None:
    async with asyncio.timeout(BOUND):
        await run_loop(loop, stop, health or LoopHealth(), rng=Least())


def ending(stop: asyncio.Event, *turns: timedelta | BaseException | None) -> tuple[Body, list[int]]:
    """A body that does the turns one after the other and stops the loop in the last; and how often it was called."""
    calls: list[int] = []

    async def body() -> timedelta | None:
        calls.append(len(calls))
        if len(calls) == len(turns):
            stop.set()
        turn = turns[len(calls) - 1]
        if isinstance(turn, BaseException):
            raise turn
        return turn

    return body, calls


def errors_of(name: str) -> float:
    return metrics.REGISTRY.get_sample_value("scheduler_loop_errors_total", {"loop": name}) or 0.0


async def test_a_failing_body_is_logged_counted_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    body, calls = ending(stop, ValueError("first"), OSError("second"), None)
    before = errors_of("failing")
    await run(Loop("failing", SHORT, body), stop)
    assert len(calls) == 3
    assert errors_of("failing") - before == 2
    records = [record for record in caplog.records if record.message == "loop.failed"]
    assert [vars(record)["failures"] for record in records] == [1, 2]
    assert all(vars(record)["loop"] == "failing" and record.exc_info for record in records)


async def test_pauses_double_while_the_body_fails_and_start_anew_after_a_success(
    pauses: list[timedelta],
) -> None:
    stop = asyncio.Event()
    fault = ValueError()
    body, _ = ending(stop, fault, fault, fault, timedelta(seconds=7), fault, None)
    await run(Loop("doubling", timedelta(seconds=1), body), stop)
    half_of = [timedelta(seconds=seconds) for seconds in (0.5, 1, 2)]
    assert pauses[1:6] == [*half_of, timedelta(seconds=7), half_of[0]]


@given(st.integers(1, 10_000), st.timedeltas(timedelta(), timedelta(days=400)), st.integers())
def test_a_backoff_is_never_nothing_and_never_beyond_its_cap(
    failures: int, every: timedelta, seed: int
) -> None:
    pause = backoff(failures, every, random.Random(seed))
    assert timedelta(milliseconds=50) <= pause <= BACKOFF_CAP
    longest = backoff(failures + 1, every, Least())
    assert longest >= backoff(failures, every, Least())


async def test_a_loop_may_recover_sooner_than_others(pauses: list[timedelta]) -> None:
    stop = asyncio.Event()
    body, _ = ending(stop, *[ValueError()] * 9, None)
    await run(Loop("eager", timedelta(seconds=1), body, recovery=timedelta(seconds=2)), stop)
    assert max(pauses) == timedelta(seconds=1)  # the lower half of two seconds


async def test_the_first_turn_is_jittered_by_a_second_at_most(pauses: list[timedelta]) -> None:
    class Middle(random.Random):
        def random(self) -> float:
            return 0.5

    stop = asyncio.Event()
    body, _ = ending(stop, None)
    await run_loop(Loop("late", LONG, body), stop, LoopHealth(), rng=Middle())
    assert pauses[0] == timedelta(milliseconds=500)


async def test_a_body_says_itself_when_it_wants_its_next_turn(pauses: list[timedelta]) -> None:
    stop = asyncio.Event()
    body, _ = ending(stop, timedelta(), timedelta(seconds=9), None, None)
    await run(Loop("saying", timedelta(seconds=3), body), stop)
    assert pauses[1:3] == [timedelta(), timedelta(seconds=9)]
    assert timedelta() < pauses[3] <= timedelta(seconds=3)


async def test_an_overlong_turn_is_followed_at_once(pauses: list[timedelta]) -> None:
    clock, stop = Clock(), asyncio.Event()
    inner, _ = ending(stop, None, None, None)
    lengths = iter([1, 5, 0])

    async def body() -> timedelta | None:
        clock.now += next(lengths)
        return await inner()

    await run(Loop("overlong", timedelta(seconds=3), body), stop, LoopHealth(clock))
    assert pauses[1:3] == [timedelta(seconds=2), timedelta()]


async def test_a_loop_without_pauses_leaves_the_others_their_turns() -> None:
    stop = asyncio.Event()
    turns = 0

    async def body() -> timedelta:
        nonlocal turns
        turns += 1
        return timedelta()

    async def other() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        stop.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(run(Loop("busy", SHORT, body), stop))
        group.create_task(other())
    assert turns > 1


async def test_cancellation_ends_the_loop_in_the_middle_of_a_turn() -> None:
    began = asyncio.Event()
    health = LoopHealth()

    async def body() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(Loop("cancelled", SHORT, body), asyncio.Event(), health))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert health.since_turn("cancelled") is None


async def test_cancellation_ends_the_loop_in_a_pause() -> None:
    turned = asyncio.Event()

    async def body() -> None:
        turned.set()

    task = asyncio.create_task(run(Loop("pausing", LONG, body), asyncio.Event()))
    await turned.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_nobody_asked_for_does_not_end_the_loop() -> None:
    stop = asyncio.Event()
    body, calls = ending(stop, asyncio.CancelledError(), None)
    before = errors_of("stray")
    async with asyncio.TaskGroup() as group:
        group.create_task(run(Loop("stray", SHORT, body), stop))
    assert len(calls) == 2
    assert errors_of("stray") - before == 1


async def test_what_is_no_ordinary_exception_is_not_survived() -> None:
    class Broken(BaseException):
        pass

    body, _ = ending(asyncio.Event(), Broken(), None)
    with pytest.raises(Broken):
        await run(Loop("broken", SHORT, body), asyncio.Event())


async def test_a_stop_ends_a_pause_at_once() -> None:
    stop, turned = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        turned.set()

    task = asyncio.create_task(run(Loop("stopped", LONG, body), stop))
    await turned.wait()
    stop.set()
    await task


async def test_a_stop_ends_a_backoff_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "backoff", lambda *_args, **_kwargs: LONG)
    stop, turned = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        turned.set()
        raise ValueError

    task = asyncio.create_task(run(Loop("stopped", SHORT, body), stop))
    await turned.wait()
    stop.set()
    await task


async def test_a_stop_lets_the_turn_finish_and_begins_no_other() -> None:
    stop, began, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    finished = 0

    async def body() -> timedelta:
        nonlocal finished
        began.set()
        await gate.wait()
        finished += 1
        return timedelta()

    task = asyncio.create_task(run(Loop("finishing", SHORT, body), stop))
    await began.wait()
    stop.set()
    gate.set()
    await task
    assert finished == 1


async def test_a_loop_that_is_stopped_before_it_began_does_nothing() -> None:
    stop = asyncio.Event()
    stop.set()
    body, calls = ending(asyncio.Event(), None)
    await run(Loop("never", LONG, body), stop)
    assert calls == []


async def test_a_ring_during_a_turn_brings_the_next_one_at_once() -> None:
    stop, wake = asyncio.Event(), Wake()
    inner, calls = ending(stop, None, None, None)

    async def body() -> timedelta | None:
        wake.ring()
        return await inner()

    await run(Loop("woken", LONG, body, wake=wake), stop)
    assert len(calls) == 3


async def test_a_ring_ends_the_pause() -> None:
    stop, wake, turned = asyncio.Event(), Wake(), asyncio.Event()
    inner, calls = ending(stop, None, None)

    async def body() -> timedelta | None:
        turned.set()
        return await inner()

    task = asyncio.create_task(run(Loop("woken", LONG, body, wake=wake), stop))
    await turned.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    wake.ring()
    await task
    assert len(calls) == 2


async def test_rings_do_not_shorten_a_backoff(pauses: list[timedelta]) -> None:
    stop, wake = asyncio.Event(), Wake()
    inner, _ = ending(stop, ValueError(), ValueError(), None)

    async def body() -> timedelta | None:
        wake.ring()
        return await inner()

    await run(Loop("failing", timedelta(seconds=1), body, wake=wake), stop)
    assert pauses == [timedelta(milliseconds=500), timedelta(seconds=1)]


async def test_several_rings_count_once() -> None:
    stop, wake = asyncio.Event(), Wake()
    wake.ring()
    wake.ring()
    async with asyncio.timeout(BOUND):
        await wake.wait(LONG, stop=stop)
        second = asyncio.create_task(wake.wait(LONG, stop=stop))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        stop.set()
        await second


async def test_a_wait_for_a_ring_ends_by_itself() -> None:
    async with asyncio.timeout(BOUND):
        await Wake().wait(SHORT, stop=asyncio.Event())


async def test_a_cancelled_wait_for_a_ring_leaves_nothing_behind() -> None:
    waiting = asyncio.create_task(Wake().wait(LONG, stop=asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_sleep_tells_whether_it_is_time_to_stop() -> None:
    stop = asyncio.Event()
    assert not await sleep_or_stop(SHORT, stop)
    assert not await sleep_or_stop(timedelta(), stop)
    stop.set()
    assert await sleep_or_stop(LONG, stop)
    assert await sleep_or_stop(timedelta(), stop)


async def test_a_database_that_fails_every_turn_for_hours_hangs_no_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stop = Clock(), asyncio.Event()
    health = LoopHealth(clock)
    seen_hung: list[str] = []
    turns = 0

    async def sleep(pause: timedelta, stop: asyncio.Event) -> bool:
        clock.now += pause.total_seconds()
        seen_hung.extend(health.hung())
        await asyncio.sleep(0)
        return stop.is_set()

    async def body() -> None:
        nonlocal turns
        turns += 1
        clock.now += 45  # acquire, statement and client time-outs one after the other
        seen_hung.extend(health.hung())
        if turns == 200:
            stop.set()
        raise OSError("no route to the database")

    monkeypatch.setattr(loops, "sleep_or_stop", sleep)
    logging.getLogger("app.loops").disabled = True
    try:
        await run(Loop("outage", timedelta(seconds=1), body), stop, health)
    finally:
        logging.getLogger("app.loops").disabled = False
    assert turns == 200
    assert seen_hung == []


async def test_a_turn_that_does_not_come_back_hangs_its_loop() -> None:
    clock, stop, began, gate = Clock(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    health = LoopHealth(clock)

    async def body() -> None:
        began.set()
        await gate.wait()

    task = asyncio.create_task(run(Loop("hanging", timedelta(seconds=1), body), stop, health))
    await began.wait()
    assert health.hung() == []
    clock.now += PATIENCE.total_seconds() - 1
    assert health.hung() == []
    clock.now += 2
    assert health.hung() == ["hanging"]
    stop.set()
    gate.set()
    await task
    assert health.hung() == []


async def test_a_slow_rhythm_is_not_a_hang() -> None:
    clock, stop, turned = Clock(), asyncio.Event(), asyncio.Event()
    health = LoopHealth(clock)

    async def body() -> None:
        turned.set()

    task = asyncio.create_task(run(Loop("hourly", LONG, body), stop, health))
    await turned.wait()
    await asyncio.sleep(0)
    clock.now += LONG.total_seconds() + 1
    assert health.hung() == []
    stop.set()
    await task


async def test_health_tells_the_last_success_apart_from_the_last_turn() -> None:
    clock = Clock()
    health = LoopHealth(clock)
    assert health.since_success("planner") is None
    assert health.since_turn("planner") is None
    health.expect("planner", LONG)
    assert health.since_success("planner") is None
    health.succeeded("planner")
    clock.now += 5
    health.failed("planner")
    clock.now += 2
    assert health.since_success("planner") == timedelta(seconds=7)
    assert health.since_turn("planner") == timedelta(seconds=2)
    health.ended("planner")
    assert health.since_success("planner") is None
