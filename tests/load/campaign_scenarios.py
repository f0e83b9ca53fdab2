"""The scenarios that take long, each small: `python -m tests.campaign load`."""

from __future__ import annotations

from datetime import timedelta

from app.load.progress import silent
from app.load.scenarios import fairness, horizon, slow, steady
from app.load.scenarios.burst import Burst
from tests.load.scenario_runs import measured, require_exactly_once


async def test_fairness_tells_what_quiet_tenants_see_alone_and_during_a_burst(dsn: str) -> None:
    wanted = fairness.Fairness(quiet_tenants=20, quiet_rate=50, seconds=10, burst=3_000)

    content = await measured(dsn, lambda place: fairness.measure(place, wanted, silent()))

    require_exactly_once(content, 500 + 3_000)
    quiet = content["quiet"]
    assert 0 < quiet["runs_during_burst"] < 500
    assert quiet["ratio"] == round(quiet["burst_p99_ms"] / quiet["solo_p99_ms"], 4)
    assert quiet["burst_p99_ms"] < content["noisy_lateness_ms"]["max"]


async def test_slow_sees_every_slow_run_in_flight_at_once_and_probes_claims_meanwhile(dsn: str) -> None:
    wanted = slow.Slow(targets=300, delay=timedelta(seconds=8), quick_rate=20, tenants=50)

    content = await measured(dsn, lambda place: slow.measure(place, wanted, silent()))

    require_exactly_once(content, 300 + 20 * wanted.seconds)
    assert content["most_in_flight"] >= slow.FULL * 300
    assert content["memory_bytes_per_run_in_flight"] is not None
    for phase in ("before", "during"):
        assert content["claim_ms"][phase]["p99"] > 0, phase


async def test_horizon_keeps_history_and_compares_bursts_with_and_without_the_snapshot(dsn: str) -> None:
    wanted = horizon.Horizon(Burst(500, tenants=50), free=2, held_seconds=1)

    content = await measured(dsn, lambda place: horizon.measure(place, wanted, silent()))

    require_exactly_once(content, 500)
    assert len(content["free_recorded_per_s"]) == 2
    assert len(content["held_recorded_per_s"]) >= 2
    assert content["ratio"] > 0


async def test_steady_delivers_every_run_at_its_own_instant(dsn: str) -> None:
    wanted = steady.Steady(rate=100, seconds=5, idle_schedules=10_000, idle_seconds=2, tenants=50)

    content = await measured(dsn, lambda place: steady.measure(place, wanted, silent()))

    require_exactly_once(content, 500)
    assert content["lateness_ms"]["p50"] < 2_000
    due = content["series"]["due"]
    assert max(due) <= 20, "they are spread over the seconds, ten in each step"
