"""docs/operations.md says nothing about what is not there, and leaves out no metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.settings.reference import entries
from tests.deploy.exposed import events, loops, metrics_of_ours
from tests.deploy.repository import DOCS, ROOT, links, sections

GUIDE = DOCS / "operations.md"
TEXT = GUIDE.read_text()
OURS = metrics_of_ours()
MINE = [
    GUIDE,
    DOCS / "guarantees.md",
    *(
        DOCS / "decisions" / name
        for name in ("README.md", "lease-as-running.md", "hint-not-queue.md", "own-migration-runner.md")
    ),
]


def test_every_metric_is_listed_with_its_type_and_labels() -> None:
    rows = re.findall(r"^\| `(scheduler_\w+)` \| (\w+) \|([^|]*)\|", TEXT, flags=re.MULTILINE)
    listed = {name: (kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows}
    assert len(listed) == len(rows)
    assert listed == {metric.name: (metric.kind, metric.labels) for metric in OURS.values()}


def test_every_label_value_that_exists_from_the_start_is_explained() -> None:
    for metric in OURS.values():
        if metric.kind == "counter" and metric.values:
            [row] = [line for line in TEXT.splitlines() if line.startswith(f"| `{metric.name}` ")]
            assert metric.values <= set(re.findall(r"`(\w+)`", row)), metric.name


def test_every_series_that_is_named_exists() -> None:
    known = set(OURS) | {metric.name for metric in OURS.values()}
    assert set(re.findall(r"scheduler_\w+", TEXT)) <= known


@pytest.mark.parametrize("page", MINE, ids=lambda page: page.name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    known = {entry.variable for entry in entries()}
    assert set(re.findall(r"SCHEDULER_\w+", page.read_text())) <= known


@pytest.mark.parametrize("page", MINE, ids=lambda page: page.name)
def test_every_event_that_is_named_is_logged(page: Path) -> None:
    known = events()
    families = {event.partition(".")[0] for event in known}
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", page.read_text()))
    assert {event for event in named if event.partition(".")[0] in families} <= known
    assert page != GUIDE or len(named & known) > 10


def test_every_loop_is_explained() -> None:
    named = set(re.findall(r"`(\w+)`", sections(GUIDE)["carillonloopfailing"].partition("|---|")[2]))
    assert named == loops()


@pytest.mark.parametrize("page", MINE, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    found = list(links(page))
    assert found
    for text, path, anchor in found:
        assert path.exists(), f"[{text}] leads to {path}"
        assert path.is_relative_to(ROOT)
        assert not anchor or anchor in sections(path), f"[{text}] leads to #{anchor}"


def test_every_decision_is_in_the_index() -> None:
    folder = DOCS / "decisions"
    indexed = {path for _, path, _ in links(folder / "README.md")}
    assert indexed == set(folder.glob("*.md")) - {folder / "README.md"}
