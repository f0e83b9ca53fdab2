"""Several runs side by side, from their summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import ConfigError
from app.load import summary

SHARED_RATIOS = (
    *("recorded_per_s", "delivered_per_s", "planned_per_s", "claim_settle_per_s", "wal_bytes_per_run"),
    "statements_per_run",
)
"""Figures that are also told as parts of the first run's."""


def read_all(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The summaries by a short name: the folder's own, with more of its path where two are alike.

    Raises ConfigError for a folder without a summary.
    """
    names = _short_names([folder.resolve() for folder in folders])
    found: dict[str, dict[str, Any]] = {}
    for name, folder in zip(names, folders, strict=True):
        try:
            found[name] = summary.read(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: no summary of a load run can be read there ({error})") from None
    return found


def compared(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of a comparison: each run's own, and how they relate to the first; good when all are."""
    first = next(iter(summaries.values()))
    problems = [
        f"{name}: {problem}"
        for name, one in summaries.items()
        for problem in one.get("verdict", {}).get("problems", [])
    ]
    return {
        "scenario": "compare",
        "runs": {name: dict(one) for name, one in summaries.items()},
        "ratios": {
            name: {key: _ratio(one.get(key), first.get(key)) for key in SHARED_RATIOS}
            for name, one in summaries.items()
        },
        "verdict": {"ok": not problems, "problems": problems, "notes": [], "bounds": {}},
    }


def _ratio(value: Any, base: Any) -> float | None:
    if isinstance(value, int | float) and isinstance(base, int | float) and base:
        return round(value / base, 4)
    return None


def _short_names(folders: Sequence[Path]) -> list[str]:
    """As many last parts of the paths as tell them apart; of the same folder twice, the later one is numbered."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({place})" for place, folder in enumerate(folders, start=1)]
