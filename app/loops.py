"""Loops that never end by accident, and how they tell that they live.

A body is an ordinary coroutine function that tests call without its loop. `run_loop` adds the rest: a
jittered start, logging, counting and backing off when the body fails, and the stop. Stopping is taking
nothing new; abandoning what runs is the caller's cancellation, which passes straight through.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from app import metrics

logger = logging.getLogger(__name__)

BACKOFF_START = timedelta(seconds=1)
BACKOFF_CAP = timedelta(seconds=30)
START_JITTER_CAP = timedelta(seconds=1)
"""Replicas that start together would otherwise tick together for ever."""

PATIENCE = timedelta(minutes=2)
"""A turn against a database that swallows packets lasts several client time-outs; that must not look
like a hang, because a restart would not help."""

Body = Callable[[], Awaitable[timedelta | None]]
"""One turn. What it returns is the delay until the next turn; None means the loop's own rhythm."""


class Wake:
    """An early end of a pause. A ring while nobody waits is remembered, and several count once.

    Not thread-safe: ring from the event loop's own thread.
    """

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, at_most: timedelta, *, stop: asyncio.Event) -> None:
        """Returns at the first of: a ring (past ones included), the time, the stop. Forgets the rings."""
        waits = [asyncio.ensure_future(self._rung.wait()), asyncio.ensure_future(stop.wait())]
        try:
            await asyncio.wait(waits, timeout=at_most.total_seconds(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._rung.clear()


@dataclass(frozen=True, slots=True)
class Loop:
    """`every` runs from the start of one turn to the start of the next; an overlong turn is followed at once.

    `patience` is how long a turn may take before the loop counts as hung (five times `every` at least).
    `recovery` bounds the pause after failures: how late a loop may notice that its database is back.
    """

    name: str
    every: timedelta
    body: Body
    wake: Wake | None = None
    patience: timedelta = PATIENCE
    recovery: timedelta = BACKOFF_CAP


@dataclass(slots=True)
class _Pulse:
    deadline: float
    last_turn: float | None = None
    last_success: float | None = None


class LoopHealth:
    """What every running loop last did. Times are those of `clock`: monotonic, in seconds.

    A loop is hung when a turn is overdue, however the turns before ended: a database outage fails turns
    and hangs none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pulses: dict[str, _Pulse] = {}

    def now(self) -> float:
        return self._clock()

    def hung(self) -> list[str]:
        """The names of the loops whose turn is overdue; empty is healthy."""
        now = self._clock()
        return sorted(name for name, pulse in self._pulses.items() if now > pulse.deadline)

    def since_success(self, name: str) -> timedelta | None:
        """How long ago the loop last succeeded; None when it never did or does not run here."""
        pulse = self._pulses.get(name)
        if pulse is None or pulse.last_success is None:
            return None
        return timedelta(seconds=self._clock() - pulse.last_success)

    def since_turn(self, name: str) -> timedelta | None:
        """How long ago a turn of the loop last ended, well or badly; None when none did."""
        pulse = self._pulses.get(name)
        if pulse is None or pulse.last_turn is None:
            return None
        return timedelta(seconds=self._clock() - pulse.last_turn)

    def expect(self, name: str, within: timedelta) -> None:
        """The next sign of life of this loop is due `within` from now."""
        deadline = self._clock() + within.total_seconds()
        pulse = self._pulses.setdefault(name, _Pulse(deadline))
        pulse.deadline = deadline

    def succeeded(self, name: str) -> None:
        now = self._clock()
        pulse = self._pulses.setdefault(name, _Pulse(now))
        pulse.last_turn = pulse.last_success = now

    def failed(self, name: str) -> None:
        now = self._clock()
        self._pulses.setdefault(name, _Pulse(now)).last_turn = now

    def ended(self, name: str) -> None:
        """A loop that has ended is expected to do nothing more."""
        self._pulses.pop(name, None)


async def run_loop(
    loop: Loop, stop: asyncio.Event, health: LoopHealth, *, rng: random.Random | None = None
) -> None:
    """Runs the body again and again until `stop`; a turn that has begun is finished.

    A failing turn is logged with its traceback, counted, and followed by a pause that doubles up to
    the loop's `recovery` and that no wake cuts short. Cancellation of the task passes through.
    """
    rng = rng or random.Random()
    limit = max(5 * loop.every, loop.patience)
    metrics.LOOP_LAST_SUCCESS_SECONDS.labels(loop.name).set_to_current_time()
    metrics.LOOP_ERRORS.labels(loop.name)
    failures = 0
    pause = min(loop.every, START_JITTER_CAP) * rng.random()
    try:
        while not await _pause(loop, pause, stop, health, limit, failures):
            health.expect(loop.name, limit)
            began = health.now()
            try:
                wanted = await _turn(loop.body)
            except Exception:
                failures += 1
                pause = backoff(failures, loop.every, rng, cap=loop.recovery)
                health.failed(loop.name)
                metrics.LOOP_ERRORS.labels(loop.name).inc()
                logger.exception(
                    "loop.failed",
                    extra={"loop": loop.name, "failures": failures, "pause_seconds": pause.total_seconds()},
                )
            else:
                failures = 0
                pause = _left_of(loop.every, health.now() - began) if wanted is None else wanted
                health.succeeded(loop.name)
                metrics.LOOP_LAST_SUCCESS_SECONDS.labels(loop.name).set_to_current_time()
    finally:
        health.ended(loop.name)


async def _turn(body: Body) -> timedelta | None:
    try:
        return await body()
    except asyncio.CancelledError:
        # Some libraries raise it by themselves (aio-libs/aiokafka#647). A TaskGroup takes such a task for
        # one that somebody cancelled and goes on without it: the loop would be gone in silence.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("a body raised CancelledError although nobody had cancelled it") from None


async def _pause(
    loop: Loop, pause: timedelta, stop: asyncio.Event, health: LoopHealth, limit: timedelta, failures: int
) -> bool:
    """True when it is time to stop."""
    health.expect(loop.name, pause + limit)
    if loop.wake is None or failures:
        return await sleep_or_stop(pause, stop)
    if pause > timedelta():
        await loop.wake.wait(pause, stop=stop)
    else:
        await asyncio.sleep(0)
    return stop.is_set()


def _left_of(every: timedelta, spent: float) -> timedelta:
    return max(every - timedelta(seconds=spent), timedelta())


def backoff(
    failures: int, every: timedelta, rng: random.Random, *, cap: timedelta = BACKOFF_CAP
) -> timedelta:
    """The pause after the nth failure in a row (n from 1): doubling, capped, the upper half of it random."""
    start = min(max(every, timedelta(milliseconds=100)), BACKOFF_START)
    ceiling = min(start * (1 << min(failures - 1, 30)), cap)
    return ceiling * rng.uniform(0.5, 1.0)


async def sleep_or_stop(pause: timedelta, stop: asyncio.Event) -> bool:
    """Sleeps, or returns early at the stop. True when it is time to stop. Even a pause of zero yields."""
    if pause <= timedelta():
        await asyncio.sleep(0)
        return stop.is_set()
    try:
        async with asyncio.timeout(pause.total_seconds()):
            await stop.wait()
    except TimeoutError:
        return stop.is_set()
    return True
