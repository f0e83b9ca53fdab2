"""What the metrics of hints have counted since a test began."""

from __future__ import annotations

from app import metrics

EVENTS = ("sent", "lost", "dropped", "received", "malformed", "stale", "claimed", "refused")


class Tally:
    """`tally("sent")`: since it was made."""

    def __init__(self) -> None:
        self._before = {event: _count("hints", event=event) for event in EVENTS}
        self._errors = {call: _count("kafka_errors", call=call) for call in ("receive", "commit")}

    def __call__(self, event: str) -> int:
        return _count("hints", event=event) - self._before[event]

    def errors(self, call: str) -> int:
        return _count("kafka_errors", call=call) - self._errors[call]


def _count(name: str, **labels: str) -> int:
    return int(metrics.REGISTRY.get_sample_value(f"scheduler_{name}_total", labels) or 0)
