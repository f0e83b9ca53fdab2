"""Bounds, and what counts as lost or doubled."""

from __future__ import annotations

import pytest

from app.load.verdict import Bound, exactly_once_problems, judge

FIGURES = {
    "expected": 10,
    "recorded": 10,
    "missing": 0,
    "duplicates": 0,
    "recorded_per_s": 100.0,
    "lateness_ms": {"p99": 20.0},
    "planned_per_s": None,
}


@pytest.mark.parametrize(
    ("option", "path", "limit", "is_kept"),
    [
        ("--max-p99-ms", ("lateness_ms", "p99"), 20.0, True),
        ("--max-p99-ms", ("lateness_ms", "p99"), 19.9, False),
        ("--min-recorded-per-s", ("recorded_per_s",), 100.0, True),
        ("--min-recorded-per-s", ("recorded_per_s",), 100.1, False),
        ("--min-planned-per-s", ("planned_per_s",), 0.0, False),  # not measured
        ("--max-cpu-us-per-run", ("cpu_us_per_run", "total"), 1e9, False),  # not there at all
    ],
)
def test_a_bound_is_kept_up_to_its_limit(
    option: str, path: tuple[str, ...], limit: float, is_kept: bool
) -> None:
    verdict = judge(FIGURES, [Bound(option, path, limit)])

    assert verdict["ok"] is is_kept
    assert is_kept or option in verdict["problems"][0]


@pytest.mark.parametrize("changed", [{"missing": 1}, {"duplicates": 1}, {"recorded": 9}, {"recorded": 11}])
def test_anything_lost_or_doubled_is_a_problem(changed: dict[str, int]) -> None:
    assert exactly_once_problems(FIGURES) == []
    assert len(exactly_once_problems({**FIGURES, **changed})) == 1


def test_figures_without_deliveries_have_nothing_to_lose() -> None:
    assert (
        exactly_once_problems({"expected": None, "recorded": None, "missing": None, "duplicates": None}) == []
    )
