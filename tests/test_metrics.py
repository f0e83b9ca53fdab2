"""Metrics: the names that alerts and autoscalers rely on, and that no label can identify a tenant."""

from __future__ import annotations

import math
import re

from prometheus_client.parser import text_string_to_metric_families

from app import metrics

RELIED_ON = {
    "scheduler_runs_due_backlog",
    "scheduler_oldest_due_seconds",
    "scheduler_clock_skew_seconds",
    "scheduler_partition_horizon_seconds",
    "scheduler_fire_lateness_seconds_bucket",
    "scheduler_claims_total",
    "scheduler_claimed_runs_total",
    "scheduler_lease_lost_total",
    "scheduler_reaped_total",
    "scheduler_settle_batch_size_bucket",
    "scheduler_settled_total",
    "scheduler_attempts_total",
    "scheduler_loop_last_success_seconds",
    "scheduler_loop_errors_total",
    "scheduler_misfires_total",
    "scheduler_planned_runs_total",
    "scheduler_planner_batch_refused_total",
    "scheduler_quarantined_total",
    "scheduler_replans_total",
    "scheduler_in_flight",
    "scheduler_slots",
    "scheduler_keeper_busy_total",
    "scheduler_tzdata_info",
}


def rendered() -> dict[str, list[tuple[dict[str, str], float]]]:
    body, media_type = metrics.render()
    assert media_type.startswith("text/plain")
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def test_the_names_that_alerts_rely_on_are_there() -> None:
    metrics.CLAIMS.labels(source="due")
    metrics.MISFIRES.labels(reason="misfire")
    metrics.LOOP_LAST_SUCCESS_SECONDS.labels("planner")
    metrics.LOOP_ERRORS.labels("planner")
    metrics.TZDATA_INFO.labels("2026a").set(1)
    assert RELIED_ON - set(rendered()) == set()


def test_no_label_names_a_tenant_or_anything_of_theirs() -> None:
    labels = {label for found in rendered().values() for each, _ in found for label in each}
    assert not [label for label in labels if re.search(r"tenant|schedule|run|key|url|host|address", label)]


def test_what_was_never_measured_does_not_read_as_zero() -> None:
    fresh = metrics._unmeasured_gauge("test_only", "A gauge of this test.")
    try:
        [(_, value)] = rendered()["scheduler_test_only"]
        assert math.isnan(value)
    finally:
        metrics.REGISTRY.unregister(fresh)


def test_outcomes_and_settlements_are_there_before_their_first() -> None:
    assert {labels["outcome"] for labels, _ in rendered()["scheduler_attempts_total"]} >= {
        "delivered",
        "timed_out",
    }
    assert {labels["settlement"] for labels, _ in rendered()["scheduler_settled_total"]} >= {
        "complete",
        "cancel",
    }


def test_a_made_up_method_makes_no_series() -> None:
    for method in ("GET", "X" * 50, "BREW"):
        metrics.note_request(method, 405, 0.01)
    shown = {labels["method"] for labels, _ in rendered()["scheduler_api_requests_total"]}
    assert {"GET", "other"} <= shown
    assert not shown & {"X" * 50, "BREW"}


def test_a_pool_is_read_at_every_scrape() -> None:
    figures = {"size": 1, "idle": 0}
    metrics.watch_pool("test", size=lambda: figures["size"], idle=lambda: figures["idle"])
    figures.update(size=5, idle=3)
    assert ({"pool": "test"}, 5.0) in rendered()["scheduler_db_pool_size"]
    assert ({"pool": "test"}, 3.0) in rendered()["scheduler_db_pool_idle"]
    metrics.DB_POOL_SIZE.remove("test")
    metrics.DB_POOL_IDLE.remove("test")
