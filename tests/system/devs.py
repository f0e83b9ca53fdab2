"""`carillon dev` as a person starts it: a child process, its output, and everything that it starts in turn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from app.errors import CarillonError
from tests.eventually import eventually
from tests.system.replicas import plain_environment

READY_WITHIN = timedelta(seconds=90)
GONE_WITHIN = timedelta(seconds=60)
SAMPLES = ("every five seconds", "once")


@dataclass(frozen=True, slots=True)
class Process:
    """One process for ever: a recycled id has another start time."""

    pid: int
    started: str
    command: str

    @property
    def is_running(self) -> bool:
        return _stat(self.pid)[1:] == (True, self.started)


class Dev:
    """One `carillon dev`. Its temporary folder is `temporary`, so that whatever it leaves is found there."""

    def __init__(self, *arguments: str, temporary: Path, log_path: Path) -> None:
        self._temporary = temporary
        self._log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", "dev", *arguments],
                env={**plain_environment(), "TMPDIR": os.fspath(temporary), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log_path.read_text(errors="replace")

    def log_of(self, child: str) -> str:
        """What one of its children has logged: `replica-1`, `receiver`."""
        return "".join(log.read_text(errors="replace") for log in self._temporary.glob(f"*/{child}.log"))

    async def ready(self) -> None:
        """Wait until it says so."""

        def probe() -> bool:
            if self.process.poll() is not None:
                raise CarillonError(f"it ended with {self.process.returncode}:\n{self.output}")
            return "\nCtrl-C stops everything." in self.output

        await eventually(probe, within=READY_WITHIN)

    def exported(self, name: str) -> str:
        """What its text tells the person to export."""
        found = re.search(rf"^  export {name}=(\S+)$", self.output, re.MULTILINE)
        assert found is not None, self.output
        return found[1]

    def told(self, what: str) -> str:
        """The line of its text about `what`."""
        found = re.search(rf"^  {what} +(.+)$", self.output, re.MULTILINE)
        assert found is not None, self.output
        return found[1]

    def told_log(self) -> str:
        """The text of the log that its own text names."""
        return Path(self.told("logs").split()[0]).read_text(errors="replace")

    def replica_urls(self) -> list[str]:
        """Where all replicas' APIs are, by its text."""
        return [self.exported("CARILLON"), *re.findall(r"^  replica \d+ +(\S+)$", self.output, re.MULTILINE)]

    def family(self) -> set[Process]:
        """It and everything below it that runs now."""
        return _descendants(self.process.pid)

    async def ended_by(self, number: signal.Signals) -> int:
        """Send a signal and wait until it and all its descendants have gone; its exit code."""
        family = self.family()
        self.process.send_signal(number)
        await eventually(lambda: self.process.poll() is not None, within=GONE_WITHIN)

        def all_gone() -> bool:
            left = [process.command for process in family if process.is_running]
            assert not left, f"still running: {left}"
            return True

        await eventually(all_gone, within=GONE_WITHIN)
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> httpx.AsyncClient:
        """The demo tenant's client."""
        return httpx.AsyncClient(
            base_url=self.exported("CARILLON"),
            headers={"authorization": f"Bearer {self.exported('KEY')}"},
            trust_env=False,
            timeout=30,
        )


async def delivered_samples(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Wait until every sample has been delivered; by name a succeeded run of each, with its attempts."""

    async def probe() -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for schedule in (await _get(client, "/v1/schedules?limit=200"))["schedules"]:
            query = f"/v1/runs?schedule_id={schedule['id']}&status=succeeded&limit=200"
            for run in (await _get(client, query))["runs"]:
                found[schedule["name"]] = await _get(client, f"/v1/runs/{run['id']}")
        assert set(found) >= set(SAMPLES), f"delivered so far: {sorted(found)}"
        return found

    return await eventually(probe)


async def run_now(client: httpx.AsyncClient, url: str) -> str:
    """Make a schedule for this target and run it at once; the run's id."""
    body = {"name": "by hand", "recurrence": {"kind": "cron", "cron": "0 0 1 1 *"}, "target": {"url": url}}
    made = await client.post("/v1/schedules", json=body)
    made.raise_for_status()
    run = await client.post(f"/v1/schedules/{made.json()['id']}/run")
    run.raise_for_status()
    return str(run.json()["id"])


def left_in(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(path.name for path in folder.iterdir())


async def _get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    answer.raise_for_status()
    return dict(answer.json())


def _descendants(pid: int) -> set[Process]:
    found: set[Process] = set()
    _, is_running, started = _stat(pid)
    if is_running:
        found.add(Process(pid, started, _stat(pid)[0]))
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in below:
            found |= _descendants(int(child))
    return found


def _stat(pid: int) -> tuple[str, bool, str]:
    """Command, whether it runs (a zombie does not), and its start time; from proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", False, ""
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], fields[0] not in ("Z", "X"), fields[19]
