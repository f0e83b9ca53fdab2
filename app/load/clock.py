"""How far this host's clock is from the database's: what turns arrivals at the target into lateness.

On one machine they are the same clock and the offset is what a round trip cannot tell; between two it is real.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from app.domain.ids import microseconds
from app.store import load_measure
from app.store.pool import Connection

LOOKS = 20


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """`ns` is this host's clock minus the database's, at most `error_ns` wrong. Nanoseconds."""

    ns: int
    error_ns: int


async def clock_offset(conn: Connection, *, looks: int = LOOKS) -> ClockOffset:
    """Ask the database for its clock several times; the quickest answer tells most."""
    return await measure_offset(lambda: load_measure.clock(conn), looks=looks)


async def measure_offset(
    ask: Callable[[], Awaitable[datetime]], *, looks: int, clock_ns: Callable[[], int] = time.time_ns
) -> ClockOffset:
    """The offset by the quickest of `looks` answers: the middle of asking and answering against what was answered."""
    best: ClockOffset | None = None
    for _ in range(looks):
        before = clock_ns()
        answer = await ask()
        after = clock_ns()
        offset = ClockOffset((before + after) // 2 - microseconds(answer) * 1000, (after - before + 1) // 2)
        if best is None or offset.error_ns < best.error_ns:
            best = offset
    assert best is not None, "at least one look is needed"
    return best
