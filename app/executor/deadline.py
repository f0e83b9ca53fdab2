"""Deadlines for many short-lived operations, on one timer.

`asyncio.timeout` makes and closes a timer of the event loop's for every use, 27 µs on uvloop (measured). Here all share
one, at the price of ending up to `TICK` late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from math import inf
from time import monotonic
from types import TracebackType

TICK = 0.05
"""Seconds between two looks at the clock, while anything is running."""


class Deadlines:
    """The operations of one event loop that must end in time. The timer runs only while there are any."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock  # not the loop's: uvloop's stands still during a turn and counts milliseconds
        self._running: set[Deadline] = set()
        self._soonest = inf  # no deadline that runs is before this; those that have ended may have been
        self._timer: asyncio.TimerHandle | None = None

    def within(self, length: timedelta) -> Deadline:
        """A context for the current task: what it encloses is cancelled once `length` has passed, as
        TimeoutError."""
        return Deadline(self, self._clock() + length.total_seconds())

    def add(self, deadline: Deadline) -> None:
        self._running.add(deadline)
        if deadline.at < self._soonest:
            self._soonest = deadline.at
        if self._timer is None:
            self._timer = self._loop.call_later(TICK, self._look)

    def discard(self, deadline: Deadline) -> None:
        self._running.discard(deadline)

    def close(self) -> None:
        """Stop the timer. What is still running has no deadline any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = self._clock()
        if now >= self._soonest:  # rarely: thousands that run are not looked at for nothing
            for deadline in [late for late in self._running if late.at <= now]:
                self._running.discard(deadline)
                deadline.expire()
            self._soonest = min((running.at for running in self._running), default=inf)
        self._timer = self._loop.call_later(TICK, self._look) if self._running else None


class Deadline:
    """One operation's deadline, with the rules of `asyncio.timeout`: a cancellation from elsewhere stays
    one."""

    __slots__ = ("_cancelling", "_owner", "_task", "at", "is_expired")

    def __init__(self, owner: Deadlines, at: float) -> None:
        self._owner = owner
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.at = at
        self.is_expired = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._owner.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owner.discard(self)
        task, self._task = self._task, None
        # The cancellation that `expire` asked for is taken back; where others remain, it was theirs as well.
        if (
            self.is_expired
            and task is not None
            and task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the task that is inside."""
        if self._task is not None:
            self.is_expired = True
            self._task.cancel()
