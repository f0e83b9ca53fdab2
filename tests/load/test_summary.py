"""The summary: all keys there, medians of repetitions, and the worst of what was lost."""

from __future__ import annotations

import json
from pathlib import Path

from app.load import summary
from app.load.run import conclude
from app.load.summary import Figures
from app.load.verdict import Bound

KEYS = (
    *("claim_mode", "schedules", "tenants", "executors", "expected", "delivered", "recorded", "duplicates"),
    *("missing", "planned_per_s", "delivered_per_s", "recorded_per_s", "lateness_ms", "cpu_us_per_run"),
    *("wal_bytes_per_run", "statements_per_run", "env"),
)
GOOD = Figures(
    scenario="burst", expected=100, delivered=100, recorded=100, duplicates=0, missing=0, recorded_per_s=50.0
)


def burst(**changes: object) -> Figures:
    return Figures(**{**{name: getattr(GOOD, name) for name in GOOD.__slots__}, **changes})


def test_every_key_is_there_and_null_when_it_was_not_measured() -> None:
    content = conclude([Figures(scenario="burst")], [], {})

    assert set(KEYS) <= set(content)
    assert content["recorded_per_s"] is None
    assert content["lateness_ms"] == dict.fromkeys(("p50", "p90", "p99", "p999", "max"))
    assert {"total", "executor", "planner", "postgres", "receiver"} <= set(content["cpu_us_per_run"])


def test_several_repetitions_are_told_as_medians_with_each_of_them_kept() -> None:
    rates = (10.0, 30.0, 80.0)
    late = [{"p50": 1.0, "p90": None, "p99": float(p99), "p999": 9.0, "max": float(p99)} for p99 in (4, 9, 5)]
    repeats = [
        burst(recorded_per_s=rate, lateness_ms=lateness) for rate, lateness in zip(rates, late, strict=True)
    ]

    content = conclude(repeats, [], {})

    assert content["recorded_per_s"] == 30.0
    assert content["lateness_ms"] == {"p50": 1.0, "p90": None, "p99": 5.0, "p999": 9.0, "max": 9.0}
    assert [one["recorded_per_s"] for one in content["repeats"]] == list(rates)


def test_one_lost_delivery_in_one_repetition_is_not_averaged_away() -> None:
    content = conclude([GOOD, burst(delivered=99, missing=1), GOOD], [], {})

    assert (content["delivered"], content["missing"]) == (99, 1)
    assert content["verdict"]["ok"] is False


def test_one_doubled_delivery_in_one_repetition_is_not_averaged_away() -> None:
    content = conclude([GOOD, burst(duplicates=1), GOOD], [], {})

    assert content["duplicates"] == 1
    assert content["verdict"]["ok"] is False


def test_a_problem_seen_in_any_repetition_is_told() -> None:
    content = conclude([GOOD, burst(problems=["something odd"])], [], {})

    assert content["verdict"]["problems"] == ["something odd"]


def test_good_is_good() -> None:
    content = conclude([GOOD], [Bound("--min-recorded-per-s", ("recorded_per_s",), 50.0)], {})

    assert content["verdict"]["ok"] is True


def test_it_is_written_whole_and_read_again(tmp_path: Path) -> None:
    content = conclude([GOOD], [], {"cores": 2})

    path = summary.write(tmp_path / "new", content)

    assert json.loads(path.read_text()) == content
    assert summary.read(tmp_path / "new") == summary.read(path) == content
