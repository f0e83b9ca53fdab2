"""On what the figures were measured: they mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.load.place import Place
from app.store import load_measure

PACKAGES = ("carillon", "asyncpg", "aiohttp", "uvloop", "aiokafka", "croniter", "cronsim")
SECRET_ENDINGS = ("PASSWORD", "ADMIN_KEY", "DATABASE_URL")


async def describe(place: Place, *, load_before: Sequence[float], arguments: Sequence[str]) -> dict[str, Any]:
    """The `env` of a summary; asks the database for its version and settings."""
    async with place.connection() as conn:
        postgres = await load_measure.server_version(conn)
        settings = await load_measure.server_settings(conn)
        counts_statements = await load_measure.statement_use(conn) is not None
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": list(arguments),
        "revision": git_revision(Path(__file__).parents[2]),
        "versions": {**package_versions(), "python": platform.python_version(), "postgresql": postgres},
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average_before": list(load_before),
        "python_loop_ms": python_loop_ms(),
        "database": "embedded" if place.postgres_pid is not None else "given",
        "broker": place.broker_name,
        "server_settings": settings,
        "replica_settings": stated(place.replica_settings()),
        "statements_counted_by": "pg_stat_statements" if counts_statements else None,
    }


def stated(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as they may stand in a report: secrets are not repeated."""
    return {name: "…" if name.endswith(SECRET_ENDINGS) else value for name, value in settings.items()}


def package_versions() -> dict[str, str | None]:
    """Versions of what does the work; None for what is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_model() -> str | None:
    """The first processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def python_loop_ms() -> float:
    """How long this machine's core takes for a million turns of an empty loop, at its best: it tells a slow hour of a
    shared machine from slow code."""
    return min(_loop_once() for _ in range(7)) * 1000


def _loop_once() -> float:
    begun = time.perf_counter()
    for _ in range(1_000_000):
        pass
    return time.perf_counter() - begun


def git_revision(folder: Path) -> str | None:
    """The revision that ran, with a plus when files differ from it; None for an installed package or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
