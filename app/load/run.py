"""One load run from its begin to its exit code: servers, repetitions, summary, report, verdict."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CarillonError
from app.load import compare, environment, report, summary, verdict
from app.load.place import Place, Wanted, open_servers, prepare
from app.load.progress import Show
from app.load.summary import Figures
from app.load.verdict import Bound
from app.local.departure import Departure
from app.settings import ClaimMode

Scenario = Callable[[Place, Show], Awaitable[Figures]]
"""One repetition of a scenario."""

EXIT_GOOD = 0
EXIT_BAD = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Order:
    """What to run, how often, where to write it, and what it must keep to.

    With several `modes` each repetition is done in every one of them, in turns: what is slow for a while is slow for
    all. `wanted.claim_mode` is then that of the servers, kafka.
    """

    scenario: Scenario
    wanted: Wanted
    out: Path
    repeat: int = 1
    bounds: Sequence[Bound] = ()
    arguments: Sequence[str] = ()
    modes: Sequence[ClaimMode] = ()


def carry_out(order: Order, show: Show) -> int:
    """Run, write `summary.json` and `report.html`, say the verdict; the exit code. Main thread only.

    Ctrl-C ends everything that was started. Raises CarillonError when the run itself could not be carried out.
    """
    order.out.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()
    departure = Departure([])
    departure.listen()
    try:
        with open_servers(order.wanted, show.step) as place:
            return asyncio.run(departure.watch(_measure_and_judge(order, place, show, load_before)))
    except (KeyboardInterrupt, asyncio.CancelledError, CarillonError):
        if not departure.is_asked:
            raise
        show.step("stopped before the end: nothing was written")
        return EXIT_INTERRUPTED


async def _measure_and_judge(order: Order, place: Place, show: Show, load_before: Sequence[float]) -> int:
    await prepare(place)
    modes = order.modes or [place.wanted.claim_mode]
    repeats: dict[ClaimMode, list[Figures]] = {mode: [] for mode in modes}
    for number in range(1, order.repeat + 1):
        for mode, done in repeats.items():
            if order.repeat > 1 or len(modes) > 1:
                show.step(f"{mode} mode, repetition {number} of {order.repeat}")
            done.append(await order.scenario(place.in_mode(mode), show))
    summaries: dict[str, dict[str, Any]] = {}
    for mode, done in repeats.items():
        env = await environment.describe(
            place.in_mode(mode), load_before=load_before, arguments=order.arguments
        )
        summaries[mode.value] = conclude(done, order.bounds, env)
    return conclude_all(summaries, order.out, show)


def conclude_all(summaries: Mapping[str, dict[str, Any]], out: Path, show: Show) -> int:
    """Write one summary, or each into a folder of its own and the comparison of all; the exit code."""
    content = next(iter(summaries.values()))
    if len(summaries) > 1:
        for name, one in summaries.items():
            write(out / name, one)
        content = compare.compared(summaries)
    return finish(content, out, show)


def finish(content: dict[str, Any], out: Path, show: Show) -> int:
    """Write it, say it; the exit code."""
    write(out, content)
    show.result(content, out)
    return EXIT_GOOD if content["verdict"]["ok"] else EXIT_BAD


def conclude(repeats: Sequence[Figures], bounds: Sequence[Bound], env: dict[str, Any]) -> dict[str, Any]:
    """The summary of several repetitions, judged: each one for itself, and the medians against the bounds."""
    problems = [problem for one in repeats for problem in one.problems]
    notes = [note for one in repeats for note in one.notes]
    merged = summary.merge([one.keys() for one in repeats])
    return summary.summary(repeats, verdict=verdict.judge(merged, bounds, problems, notes), env=env)


def write(out: Path, content: dict[str, Any]) -> None:
    """Both files."""
    summary.write(out, content)
    report.write(out / "report.html", content)
