"""Good or not: exactly once, and within the bounds that were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """One `--max-…` or `--min-…`: the figure at `path` must not be above (below) `limit`."""

    option: str
    path: tuple[str, ...]
    limit: float

    @property
    def is_upper(self) -> bool:
        return self.option.startswith("--max-")

    def problem(self, figures: Mapping[str, Any]) -> str | None:
        """What is wrong, in words; None when the bound is kept. A figure that was not measured keeps no bound."""
        figure = figure_at(figures, self.path)
        name = ".".join(self.path)
        if figure is None:
            return f"{self.option} {self.limit:g}: {name} was not measured"
        is_kept = figure <= self.limit if self.is_upper else figure >= self.limit
        word = "above" if self.is_upper else "below"
        return None if is_kept else f"{name} is {figure:,.4g}, {word} {self.option} {self.limit:g}"


def figure_at(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The number at a path of keys; None when there is none."""
    found: Any = figures
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def exactly_once_problems(figures: Mapping[str, Any]) -> list[str]:
    """What was lost or doubled, in words. Figures that the scenario does not have say nothing."""
    problems: list[str] = []
    expected = figures.get("expected")
    if figures.get("missing"):
        problems.append(f"{figures['missing']:,} of {expected:,} deliveries are missing")
    if figures.get("duplicates"):
        problems.append(f"{figures['duplicates']:,} requests came more than once")
    recorded = figures.get("recorded")
    if expected is not None and recorded is not None and recorded != expected:
        problems.append(f"{recorded:,} of {expected:,} runs are recorded as succeeded")
    return problems


def judge(
    figures: Mapping[str, Any],
    bounds: Sequence[Bound],
    problems: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The verdict as `summary.json` has it: `ok`, and every problem in words. `problems` are those seen on the way."""
    found = [*problems, *exactly_once_problems(figures)]
    found += [problem for bound in bounds if (problem := bound.problem(figures)) is not None]
    return {
        "ok": not found,
        "problems": found,
        "notes": list(dict.fromkeys(notes)),
        "bounds": {bound.option: bound.limit for bound in bounds},
    }
