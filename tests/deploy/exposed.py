"""What a replica exposes: every metric of app.metrics with its type and labels, also those without a sample yet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from app import metrics
from tests.deploy.repository import ROOT

SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True, slots=True)
class Exposed:
    """`name` is how people write it: with `_total` for a counter, without a suffix for a histogram."""

    name: str
    kind: str
    labels: frozenset[str]
    values: frozenset[str]
    """Label values that exist from the start; none when they come with their first use."""


def metrics_of_ours() -> dict[str, Exposed]:
    """By the name of each series: `…_total`, `…_bucket`, …"""
    found: dict[str, Exposed] = {}
    for metric in vars(metrics).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        [family] = metric.describe()
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset(metric._labelnames)
        children = getattr(metric, "_metrics", {})
        exposed = Exposed(
            name, family.type, labels, frozenset(value for child in children for value in child)
        )
        for suffix in SERIES[family.type]:
            found[family.name + suffix] = exposed
    return found


def loops() -> set[str]:
    """The names of the loops that the composition root makes."""
    return set(re.findall(r'\bLoop\(\s*"(\w+)"', (ROOT / "app" / "main.py").read_text()))


def events() -> set[str]:
    """Every event that the application logs."""
    sources = [path.read_text() for path in (ROOT / "app").rglob("*.py")]
    call = re.compile(r'logger\.(?:debug|info|warning|error|exception)\(\s*"([a-z_]+\.[a-z_]+)"')
    return {event for source in sources for event in call.findall(source)}
