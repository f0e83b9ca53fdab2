from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scale import measured
from tests.scale.simulation import Fleet, Service, simulate

WIDE = Fleet(executors=16, executor_cores=16, database_cores=64, planners=4, lookahead=60.0)


def test_the_measured_burst_comes_out_as_it_was_measured() -> None:
    found = simulate(measured.RUNS, measured.FLEET, measured.SERVICE)
    assert found.recorded_per_s == pytest.approx(measured.RECORDED_PER_S, rel=0.2)
    assert found.lateness_p99 == pytest.approx(measured.LATENESS_P99, rel=0.2)
    planned_per_s = measured.RUNS / (found.planned_at + measured.FLEET.lookahead)
    assert planned_per_s == pytest.approx(
        measured.PLANNED_PER_S, rel=0.35
    )  # one process's own work is not in it


def test_the_measured_costs_add_up_to_two_busy_cores() -> None:
    """Otherwise the point would not be one of CPU time, and the simulation would speak of something else."""
    service = measured.SERVICE
    each = sum(
        (
            service.planner,
            service.database_plan,
            service.database_claim,
            service.database_settle,
            service.executor,
            service.receiver,
        )
    )
    busy = measured.RECORDED_PER_S * each / 1_000_000
    assert 1.6 <= busy <= 2.6  # the planning before the instant is in the costs and not in the rate


def test_executors_scale_until_the_database_is_full() -> None:
    service = measured.SERVICE
    rates = [
        simulate(200_000, replace(WIDE, executors=n, executor_cores=n), service).recorded_per_s
        for n in (4, 8, 16)
    ]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.1)
    assert rates[2] == pytest.approx(2 * rates[1], rel=0.1)
    small = replace(WIDE, executors=64, executor_cores=64, database_cores=4)
    ceiling = 4 / (service.database_claim + service.database_settle) * 1_000_000
    assert 0.7 * ceiling < simulate(200_000, small, service).recorded_per_s <= ceiling


def test_what_is_not_planned_in_time_is_late() -> None:
    slow = replace(measured.SERVICE, planner=1_000.0)
    one = replace(WIDE, planners=1, plan_abreast=1)
    assert simulate(50_000, one, slow).planned_at < 0
    late = simulate(50_000, replace(one, lookahead=5.0), slow)
    assert late.planned_at > 40
    assert late.lateness_p99 > 40


def test_every_run_is_settled_once_whatever_the_sizes() -> None:
    free = Service(planner=1, database_plan=1, database_claim=1, database_settle=1, executor=1)
    for runs in (1, 7, 399, 400, 401, 12_345):
        fleet = Fleet(executors=3, database_cores=1, slots=40, batch=7, plan_batch=11)
        assert simulate(runs, fleet, free).runs == runs
