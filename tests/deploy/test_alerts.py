"""deploy/alerts.yaml: expressions that parse, about metrics that exist, each with a section that says what to do.

When they fire is tried by promtool, with deploy/alerts.test.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import promql_parser as promql
import pytest

from app.cli.doctor import CLOCK_TOLERANCE, HORIZON_WANTED
from app.settings import ExecutorSettings
from app.settings.groups import ClaimSettings, PartitionSettings, PlannerSettings, RetentionSettings
from tests.deploy.exposed import Exposed, loops, metrics_of_ours
from tests.deploy.repository import DEPLOY, DOCS, read_yaml, sections

RULES: list[dict[str, Any]] = [
    rule for group in read_yaml(DEPLOY / "alerts.yaml")["groups"] for rule in group["rules"]
]
BY_NAME = {rule["alert"]: rule for rule in RULES}
OURS = metrics_of_ours()
OF_PROMETHEUS = {"up": Exposed("up", "gauge", frozenset(), frozenset())}
OF_THE_SCRAPE = {"job", "instance"}
JOB = "carillon"


@dataclass(slots=True)
class Asked:
    """What an expression asks for."""

    metrics: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    """Labels that it groups or matches by."""


def asked(expression: str) -> Asked:
    found = Asked()
    for node in nodes(promql.parse(expression)):
        match node:
            case promql.VectorSelector():
                assert node.name is not None
                pairs = found.metrics.setdefault(node.name, set())
                for matcher in node.matchers.matchers:
                    pairs.update((matcher.name, value) for value in matcher.value.split("|"))
            case promql.AggregateExpr() if node.modifier is not None:
                found.labels.update(node.modifier.labels)
            case promql.BinaryExpr() if node.modifier is not None and node.modifier.matching is not None:
                found.labels.update(node.modifier.matching.labels)
            case _:
                pass
    return found


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from nodes(child)
    for child in getattr(node, "args", []):
        yield from nodes(child)


def labels_of(name: str, metric: Exposed) -> set[str]:
    return set(metric.labels) | OF_THE_SCRAPE | ({"le"} if name.endswith("_bucket") else set())


@pytest.mark.parametrize("name", BY_NAME)
def test_an_alert_is_about_metrics_and_labels_that_exist(name: str) -> None:
    found = asked(BY_NAME[name]["expr"])
    assert found.metrics
    known = OURS | OF_PROMETHEUS
    assert set(found.metrics) <= set(known)
    for series, pairs in found.metrics.items():
        for label, value in pairs:
            assert label in labels_of(series, known[series]), f"{series} has no label {label}"
            assert value in _values(label, known[series]), f"{series} has never {label}={value}"
    every = set().union(*(labels_of(series, known[series]) for series in found.metrics))
    assert found.labels <= every


def _values(label: str, metric: Exposed) -> frozenset[str] | set[str]:
    match label:
        case "job":
            return {JOB}
        case "loop":
            return loops()
        case _:
            return metric.values


def test_what_is_no_metric_or_no_label_of_it_would_be_noticed() -> None:
    found = asked('sum by (job) (rate(a_total{event=~"lost|gone"}[5m])) / on (instance) b{x!="1"} > 2')
    assert found.metrics == {"a_total": {("event", "lost"), ("event", "gone")}, "b": {("x", "1")}}
    assert found.labels == {"job", "instance"}
    assert "gone" not in _values("event", OURS["scheduler_hints_total"])
    with pytest.raises(ValueError, match="unclosed"):
        promql.parse("sum by (job (x)")


@pytest.mark.parametrize("name", BY_NAME)
def test_an_alert_says_how_urgent_it_is_what_is_wrong_and_where_to_read_on(name: str) -> None:
    rule = BY_NAME[name]
    assert re.fullmatch(r"Carillon[A-Z]\w+", name)
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"]["summary"].endswith((".", "}}."))
    assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    guide = sections(DOCS / "operations.md")
    written = {anchor for anchor in guide if anchor.startswith("carillon")}
    assert written == {name.lower() for name in BY_NAME}
    assert all(len(guide[anchor].split()) >= 15 for anchor in written), "a section says what to do"
    assert len(BY_NAME) == len(RULES)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [
        case for test in read_yaml(DEPLOY / "alerts.test.yaml")["tests"] for case in test["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == set(BY_NAME)
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == set(BY_NAME)


def test_the_bounds_are_those_of_the_doctor() -> None:
    for name in ("CarillonClockSkew", "CarillonDatabaseClockOff"):
        assert BY_NAME[name]["expr"].endswith(f"> {CLOCK_TOLERANCE.seconds}")
    assert BY_NAME["CarillonMonthsRunOut"]["expr"].endswith(f"< {HORIZON_WANTED.days} * 86400")


def test_every_loop_is_watched_and_no_allowed_rhythm_is_taken_for_a_stall() -> None:
    pattern = r'loop=~"([\w|]+)"\} > (\d+)(?: \* (\d+))?'
    quick, slow = re.findall(pattern, BY_NAME["CarillonLoopStalled"]["expr"])
    watched = [set(names.split("|")) for names, *_ in (quick, slow)]
    assert watched[0] | watched[1] == loops()
    assert watched[1] == {"partitions", "retention"}
    bounds = [timedelta(seconds=int(first) * int(second or 1)) for _, first, second in (quick, slow)]
    slowest_keeper = ExecutorSettings(
        delivery_timeout=longest(ExecutorSettings, "delivery_timeout"), drain_grace=timedelta(hours=1)
    ).keeper_interval
    rhythms = (
        longest(PlannerSettings, "tick"),
        longest(ClaimSettings, "poll_interval"),
        longest(ClaimSettings, "reap_interval"),
        slowest_keeper,
    )
    assert bounds[0] > max(rhythms)
    assert bounds[1] > longest(PartitionSettings, "check_interval")
    assert bounds[1] > longest(RetentionSettings, "check_interval")


def longest(group: Any, name: str) -> timedelta:
    """The upper bound of a duration among the settings."""
    [bound] = [each.le for each in group.model_fields[name].metadata if hasattr(each, "le")]
    assert isinstance(bound, timedelta)
    return bound
