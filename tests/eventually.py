"""The one way for a test to wait for something that tells nobody when it happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar, overload

T = TypeVar("T")

LIMIT = timedelta(seconds=20)
STEP = 0.01


@overload
async def eventually(probe: Callable[[], Awaitable[T]], *, within: timedelta = LIMIT) -> T: ...
@overload
async def eventually(probe: Callable[[], T], *, within: timedelta = LIMIT) -> T: ...
async def eventually(probe: Callable[[], Any], *, within: timedelta = LIMIT) -> Any:
    """Call `probe` until its answer is true, and return that answer.

    An AssertionError inside `probe` counts as "not yet"; any other exception ends the wait. When the time is over the
    last AssertionError is raised, or one that shows the last answer. The probe is always asked once more at the end,
    so a slow machine fails no test whose condition holds.
    """
    deadline = time.monotonic() + within.total_seconds()
    while True:
        last_try = time.monotonic() >= deadline
        try:
            answer = probe()
            if isinstance(answer, Awaitable):
                answer = await answer
        except AssertionError:
            if last_try:
                raise
        else:
            if answer:
                return answer
            assert not last_try, f"not within {within.total_seconds():g} s; the last answer was {answer!r}"
        await asyncio.sleep(STEP)
