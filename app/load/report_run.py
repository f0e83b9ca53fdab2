"""One summary as the report reads it: figures by path, and nothing taken on trust."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.load.report_numbers import number

COMMON = frozenset(
    {
        *("scenario", "claim_mode", "schedules", "tenants", "executors", "expected", "delivered", "recorded"),
        *(
            "duplicates",
            "missing",
            "planned_per_s",
            "delivered_per_s",
            "recorded_per_s",
            "claim_settle_per_s",
        ),
        *("lateness_ms", "cpu_us_per_run", "wal_bytes_per_run", "statements_per_run", "transactions_per_run"),
        *("others_cpu_share", "stolen_cpu_share", "verdict", "env", "series", "lateness_curve", "repeats"),
    }
)
"""Keys that have a place of their own in the report; the others are the scenario's own."""


DISTRIBUTION = ("p50", "p90", "p99", "p999", "max")


def is_distribution(value: Any) -> bool:
    """Whether a group is that of the percentiles of one thing, which is told in one row."""
    return isinstance(value, Mapping) and "p99" in value and set(value) <= {*DISTRIBUTION, "count"}


@dataclass(frozen=True, slots=True)
class Run:
    """A summary with the name of its column."""

    name: str
    summary: Mapping[str, Any]

    def number(self, *path: str) -> float | None:
        """The number at a path of keys; None when it was not measured."""
        return number(self._at(path))

    def text(self, *path: str) -> str | None:
        """What stands at a path, as text; None for nothing and for whole groups."""
        found = self._at(path)
        return None if found is None or isinstance(found, Mapping | list) else str(found)

    def group(self, *path: str) -> Mapping[str, Any]:
        """The mapping at a path; an empty one when there is none."""
        found = self._at(path)
        return found if isinstance(found, Mapping) else {}

    def items(self, *path: str) -> Sequence[Any]:
        """The list at a path; an empty one when there is none."""
        found = self._at(path)
        return found if isinstance(found, list | tuple) else []

    def numbers(self, *path: str) -> list[float]:
        """The list of numbers at a path; what is no number is zero, so that the places stay."""
        return [number(value) or 0.0 for value in self.items(*path)]

    @property
    def scenario(self) -> str:
        return self.text("scenario") or "load"

    @property
    def is_good(self) -> bool | None:
        """The verdict; None when the summary has none."""
        found = self.group("verdict").get("ok")
        return found if isinstance(found, bool) else None

    def own(self) -> Iterator[tuple[str, Any]]:
        """The scenario's own figures by dotted key, groups taken apart, but for percentiles."""
        for key, value in self.summary.items():
            if key not in COMMON:
                yield from _flat(str(key), value)

    def _at(self, path: Sequence[str]) -> Any:
        found: Any = self.summary
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def runs_of(summary: Mapping[str, Any]) -> list[Run]:
    """The one run of a summary, or those of a comparison."""
    compared = Run("", summary).group("runs")
    columns = [Run(str(name), one) for name, one in compared.items() if isinstance(one, Mapping)]
    return columns or [Run(str(summary.get("scenario", "load")), summary)]


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and not is_distribution(value):
        for name, one in value.items():
            yield from _flat(f"{key}.{name}", one)
    else:
        yield key, value
