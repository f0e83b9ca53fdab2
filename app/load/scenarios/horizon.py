"""`horizon`: bursts while another session holds a snapshot, so that nothing that has ended can be cleaned up.

History stays from burst to burst, with and without the snapshot, so that the two differ in nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from app.errors import CarillonError
from app.load.counting import figures_of
from app.load.place import Place
from app.load.progress import Show
from app.load.round import play
from app.load.scenarios.burst import Burst
from app.load.seeds import Crowd
from app.load.stage import History
from app.load.summary import Figures
from app.store import load_measure


@dataclass(frozen=True, slots=True)
class Horizon:
    """`free` bursts, then bursts for `held_seconds` (two at least) under a snapshot taken before the first of them."""

    burst: Burst
    free: int
    held_seconds: int


async def measure(place: Place, horizon: Horizon, show: Show) -> Figures:
    """All bursts. Raises CarillonError when it cannot be carried out."""
    free: list[Figures] = []
    held: list[Figures] = []
    for number in range(horizon.free):
        history = History.KEPT if free else History.CLEARED
        free.append(await _burst(place, horizon.burst, show, seed=1 + number, history=history))
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(place.connection("load holds a snapshot"))
        begun = time.monotonic()
        await stack.enter_async_context(load_measure.held_snapshot(holder))
        show.step(f"a snapshot is held for {horizon.held_seconds} s at least")
        while time.monotonic() - begun < horizon.held_seconds or len(held) < 2:
            seed = 1 + horizon.free + len(held)
            held.append(await _burst(place, horizon.burst, show, seed=seed, history=History.KEPT))
        if not await load_measure.is_snapshot_held(holder):
            raise CarillonError("the snapshot was lost while it was to be held")
        lasted = time.monotonic() - begun
    return _joined(free, held, lasted)


async def _burst(place: Place, burst: Burst, show: Show, *, seed: int, history: History) -> Figures:
    outcome = await play(
        place,
        burst.fleet,
        lambda first, url: list(Crowd(burst.schedules, burst.tenants, seed=seed).at(first, url)),
        show,
        tenants=burst.tenants,
        history=history,
    )
    return figures_of(
        "horizon", outcome, burst.fleet, claim_mode=place.wanted.claim_mode.value, tenants=burst.tenants
    )


def _joined(free: Sequence[Figures], held: Sequence[Figures], lasted: float) -> Figures:
    """The last held burst's figures, where the snapshot hurts most, with what the bursts say of each other."""
    worst = held[-1]
    free_rates = [one.recorded_per_s for one in free if one.recorded_per_s is not None]
    held_rates = [one.recorded_per_s for one in held if one.recorded_per_s is not None]
    ratio = (
        statistics.median(held_rates) / statistics.median(free_rates) if held_rates and free_rates else None
    )
    last_ratio = held_rates[-1] / statistics.median(free_rates) if held_rates and free_rates else None
    return replace(
        worst,
        own={
            **worst.own,
            "ratio": ratio,
            "ratio_of_last": last_ratio,
            "held_seconds": lasted,
            "free_recorded_per_s": free_rates,
            "held_recorded_per_s": held_rates,
        },
        duplicates=sum(one.duplicates or 0 for one in (*free, *held)),
        missing=sum(one.missing or 0 for one in (*free, *held)),
        problems=[problem for one in (*free, *held) for problem in one.problems],
    )
