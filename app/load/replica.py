"""One replica that is measured, and what it says of itself: its log, its health, its metrics."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from app.local.processes import Child


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of Carillon, `python -m app serve`."""

    name: str
    part: str
    child: Child

    @property
    def url(self) -> str | None:
        """Where its health and metrics are; None before it is ready."""
        for event in _events(self.child):
            if event.get("event") == "replica.ready":
                return str(event["url"])
        return None


def _events(child: Child) -> Iterator[dict[str, object]]:
    """The complete lines of a replica's log that are JSON."""
    text = child.log_path.read_text(encoding="utf-8", errors="replace")
    for line in text[: text.rfind("\n") + 1].splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def probe_client() -> httpx.AsyncClient:
    """A client for health and metrics."""
    return httpx.AsyncClient(trust_env=False, timeout=10)


async def is_ready(client: httpx.AsyncClient, replica: Replica) -> bool:
    if replica.url is None:
        return False
    try:
        return (await client.get(f"{replica.url}/readyz")).is_success
    except httpx.TransportError:
        return False


async def metric(client: httpx.AsyncClient, replica: Replica, name: str) -> float:
    """One gauge or counter without labels, by its name without the prefix; 0 before it is told."""
    text = (await client.get(f"{replica.url}/metrics")).text
    found = re.search(rf"^scheduler_{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0
