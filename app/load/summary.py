"""What a load run says, and how it is written: `summary.json`.

Every scenario has the same keys first, null where it does not measure one; its own keys follow, then `verdict`, `env`,
`series`, `statements`, `lateness_curve` and `repeats`. Nothing is estimated: what was not measured is null.

    series          {"step_ms": 100, "begin_ms": -4900, "due": [..], "planned": [..], "delivered": [..],
                     "recorded": [..], "backlog": [..]}     one number per step; 0 ms is the (first) instant;
                     backlog = due and not yet recorded, at the end of the step
    lateness_curve  [[percentile, milliseconds], ..]        as HdrHistogram plots have it
    statements      [{"query", "calls_per_run", "us_per_run", "ms_per_call"}, ..]        those that took most time
    repeats         the figures of each repetition, when there were several
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.load.costs import PARTS

LATENESS = ("p50", "p90", "p99", "p999", "max")
NO_LATENESS: Mapping[str, float | None] = dict.fromkeys(LATENESS)
NO_CPU: Mapping[str, float | None] = dict.fromkeys(("total", *PARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One repetition of a scenario. `own` are the keys that only this scenario has. Units are in the keys' names.

    `problems` make the verdict bad, `notes` only say what a reader must know.
    """

    scenario: str
    claim_mode: str | None = None
    schedules: int | None = None
    tenants: int | None = None
    executors: int | None = None
    expected: int | None = None
    delivered: int | None = None
    recorded: int | None = None
    duplicates: int | None = None
    missing: int | None = None
    planned_per_s: float | None = None
    delivered_per_s: float | None = None
    recorded_per_s: float | None = None
    lateness_ms: Mapping[str, float | None] = field(default_factory=lambda: NO_LATENESS)
    cpu_us_per_run: Mapping[str, float | None] = field(default_factory=lambda: NO_CPU)
    wal_bytes_per_run: float | None = None
    statements_per_run: float | None = None
    transactions_per_run: float | None = None
    others_cpu_share: float | None = None
    stolen_cpu_share: float | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    statements: Sequence[Mapping[str, Any]] | None = None
    series: Mapping[str, Any] | None = None
    lateness_curve: Sequence[tuple[float, float]] = ()

    def keys(self) -> dict[str, Any]:
        """The figures as `summary.json` has them, in order, without what is drawn."""
        own = dict(self.own)
        common = {name: getattr(self, name) for name in COMMON}
        return {
            **{key: dict(value) if isinstance(value, Mapping) else value for key, value in common.items()},
            **own,
        }


COMMON = (
    *("scenario", "claim_mode", "schedules", "tenants", "executors", "expected", "delivered", "recorded"),
    *("duplicates", "missing", "planned_per_s", "delivered_per_s", "recorded_per_s", "lateness_ms"),
    *("cpu_us_per_run", "wal_bytes_per_run", "statements_per_run", "transactions_per_run"),
    *("others_cpu_share", "stolen_cpu_share"),
)
WORST_IS_MOST = frozenset({"duplicates", "missing", "max"})
WORST_IS_LEAST = frozenset({"delivered", "recorded"})


def merge(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several repetitions as one: medians, but what was lost or doubled is the worst that was seen.

    A figure that some repetition has not measured is that of the others.
    """
    return {key: _merged(key, [one.get(key) for one in repeats]) for key in repeats[0]}


def _merged(key: str, values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if not there:
        return None
    if all(isinstance(value, Mapping) for value in there):
        return merge(there)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in there):
        return there[0]
    if key in WORST_IS_MOST:
        return max(there)
    if key in WORST_IS_LEAST:
        return min(there)
    return statistics.median(there)


def summary(
    repeats: Sequence[Figures], *, verdict: Mapping[str, Any], env: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything of one run. The curves are those of the repetition in the middle."""
    middle = _middle(repeats)
    merged = merge([one.keys() for one in repeats])
    content: dict[str, Any] = _rounded(
        {
            **merged,
            "verdict": verdict,
            "env": env,
            "series": middle.series,
            "statements": middle.statements,
            "lateness_curve": [list(point) for point in middle.lateness_curve],
            "repeats": [one.keys() for one in repeats] if len(repeats) > 1 else [],
        }
    )
    return content


def _middle(repeats: Sequence[Figures]) -> Figures:
    ordered = sorted(repeats, key=lambda one: one.recorded_per_s or 0.0)
    return ordered[(len(ordered) - 1) // 2]


def _rounded(value: Any) -> Any:
    """Four significant places behind the point are more than any of this is worth."""
    match value:
        case float():
            return round(value, 4)
        case Mapping():
            return {key: _rounded(one) for key, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
        case _:
            return value


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write `summary.json` into the folder; it is complete or not there at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "summary.json"
    unfinished = folder / "summary.json.new"
    unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.rename(path)
    return path


def read(folder: Path) -> dict[str, Any]:
    """Read what `write` wrote, from its folder or the file itself. Raises OSError and ValueError."""
    path = folder / "summary.json" if folder.is_dir() else folder
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found
