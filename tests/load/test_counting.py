"""From rows to rates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from app.load.counting import planned_per_s, rate
from app.store.load_measure import PlannedRuns

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def test_the_last_batch_counts_with_the_mean_length_of_the_others() -> None:
    planned = PlannedRuns(runs=5_000, batches=10, first_at=T0, last_at=at(0.9))

    assert planned_per_s(planned, 1, seen_at=at(99)) == pytest.approx(5_000)


def test_of_two_planners_two_batches_have_no_end() -> None:
    planned = PlannedRuns(runs=5_000, batches=10, first_at=T0, last_at=at(0.8))

    assert planned_per_s(planned, 2, seen_at=at(99)) == pytest.approx(5_000)


def test_a_single_batch_ends_when_it_was_seen() -> None:
    planned = PlannedRuns(runs=500, batches=1, first_at=T0, last_at=T0)

    assert planned_per_s(planned, 1, seen_at=at(0.5)) == 1_000
    assert planned_per_s(planned, 1, seen_at=None) is None


def test_without_runs_there_is_no_rate() -> None:
    assert planned_per_s(PlannedRuns(0, 0, None, None), 1, seen_at=at(1)) is None
    assert rate(10, T0, None) is None
    assert rate(10, T0, T0) is None
    assert rate(10, T0, at(2)) == 5
