"""Replicas as real processes: `python -m app serve` on a test's database, watched from outside only."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx

from app.errors import CarillonError
from app.local.processes import Child, log_tail, spawn, stop_all, wait_ended
from tests.eventually import eventually

ADMIN_KEY = "administrators-of-the-system-tests"
READY_WITHIN = timedelta(seconds=60)
ENDED_WITHIN = timedelta(seconds=60)

SHORT = {"SCHEDULER_EXECUTOR_DELIVERY_TIMEOUT": "3s", "SCHEDULER_EXECUTOR_DRAIN_GRACE": "20s"}
"""A lease of 6 s: long enough for a busy machine, short enough to wait for its end."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One process; `url` is its API once it is ready."""

    name: str
    child: Child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.child.process.poll() is None

    @property
    def url(self) -> str:
        """Raises AssertionError before the replica is ready."""
        found = [str(event["url"]) for event in self.events("replica.ready")]
        assert found, f"{self.name} is not ready:\n{log_tail(self.child.log_path)}"
        return found[0]

    def events(self, *names: str) -> list[dict[str, object]]:
        """What it has logged so far; only these events when some are named."""
        return [event for event in read_events(self.child.log_path) if not names or event["event"] in names]

    def send(self, number: signal.Signals) -> None:
        self.child.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        await eventually(lambda: not self.is_running, within=ENDED_WITHIN)
        return await wait_ended(self.child)

    async def saw(self, event: str) -> None:
        """Wait until it has logged this event."""
        await eventually(lambda: self.events(event), within=ENDED_WITHIN)


def read_events(log_path: Path) -> list[dict[str, object]]:
    """The complete lines of a replica's log; a line that is not JSON is an event of its own, `not json`."""
    text = log_path.read_text(errors="replace")
    return [_read_line(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _read_line(line: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError:
        return {"event": "not json", "level": "error", "line": line}
    assert isinstance(found, dict)
    return found


@dataclass(slots=True)
class Fleet:
    """The replicas of one test, on one database."""

    dsn: str
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    _expected: set[str] = field(default_factory=set)

    def launch(self, name: str, /, **settings: str) -> Replica:
        """Start a replica and do not wait for it. Settings by name without the prefix: `executor_slots="5"`."""
        environment = {
            **plain_environment(),
            "SCHEDULER_DATABASE_URL": self.dsn,
            "SCHEDULER_REPLICA": name,
            "SCHEDULER_API_PORT": "0",
            "SCHEDULER_API_ADMIN_KEY": ADMIN_KEY,
            "SCHEDULER_EXECUTOR_ALLOW_LOOPBACK_TARGETS": "true",
            **SHORT,
            **self.settings,
            **{f"SCHEDULER_{key.upper()}": value for key, value in settings.items()},
        }
        child = spawn(
            [sys.executable, "-m", "app", "serve"], env=environment, log_path=self.folder / f"{name}.log"
        )
        replica = Replica(name, child)
        self.replicas.append(replica)
        return replica

    async def start(self, *names: str, **settings: str) -> list[Replica]:
        """Start replicas and wait until all of them are ready."""
        started = [self.launch(name, **settings) for name in names]
        for replica in started:
            await ready(replica)
        return started

    def expect(self, *events: str) -> None:
        """These errors in the logs belong to the test; all others fail it at its end."""
        self._expected.update(events)

    def stop(self) -> None:
        """SIGTERM to whoever still runs, SIGKILL to whoever does not end; then look into the logs."""
        stop_all([replica.child for replica in self.replicas], grace=ENDED_WITHIN)
        errors = list(self._unexpected_errors())
        assert not errors, f"errors in the replicas' logs: {errors[:10]}"

    def kill(self) -> None:
        """End everything at once."""
        for replica in self.replicas:
            replica.child.process.kill()
            replica.child.process.wait()

    def _unexpected_errors(self) -> Iterator[dict[str, object]]:
        for replica in self.replicas:
            for event in replica.events():
                if event["level"] in ("error", "critical") and event["event"] not in self._expected:
                    yield event


async def ready(replica: Replica) -> None:
    """Wait until it says that it is ready for traffic. Raises CarillonError, with its log, when it ends first."""

    async def is_up() -> bool:
        if not replica.is_running:
            code = replica.child.process.returncode
            raise CarillonError(f"{replica.name} ended with {code}:\n{log_tail(replica.child.log_path)}")
        return bool(replica.url) and (await client.get(f"{replica.url}/readyz")).is_success

    async with probe() as client:
        await eventually(is_up, within=READY_WITHIN)


def probe() -> httpx.AsyncClient:
    """A client for probes and metrics."""
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=30)


def plain_environment() -> dict[str, str]:
    """Ours without any setting of Carillon."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("SCHEDULER_")}
