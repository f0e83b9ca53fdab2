"""Fixtures that fail a test which leaves something behind: an exception nobody saw, a task, a child process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Servers

TURNS = 20
"""How many turns of the loop a cancelled task gets to end."""


@pytest.fixture
async def no_lost_tasks() -> AsyncIterator[None]:
    """Fail when the loop reports anything (an exception in a task that nobody awaited) or when a task is left."""
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reports.append(context))
    yield
    left = await _tasks_left()
    gc.collect()  # "exception was never retrieved" is reported when the task is collected
    await asyncio.sleep(0)
    loop.set_exception_handler(None)
    problems = [_tell(report) for report in reports] + [f"a task is still running: {task!r}" for task in left]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture(autouse=True)
def no_children_left(servers: Servers) -> Iterator[None]:
    """Fail when a child process is left that was not there before, also one that ended and was not waited for."""
    before = children()
    yield
    left = children() - before - servers.pids()
    if left:
        names = ", ".join(f"{pid} ({_command(pid)})" for pid in sorted(left))
        pytest.fail(f"child processes are left: {names}", pytrace=False)


def children() -> set[int]:
    """The process ids of our direct children."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found.update(int(pid) for pid in path.read_text().split())
    return found


async def _tasks_left() -> list[asyncio.Task[Any]]:
    this = asyncio.current_task()
    left: list[asyncio.Task[Any]] = []
    for _ in range(TURNS):
        left = [task for task in asyncio.all_tasks() if task is not this]
        if not left:
            break
        await asyncio.sleep(0)
    return left


def _tell(report: dict[str, Any]) -> str:
    error = report.get("exception")
    what = f"{report.get('message')}: {error!r}" if error else str(report.get("message"))
    source = report.get("task") or report.get("future") or report.get("handle")
    return f"{what} in {source!r}" if source else what


def _command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return "ended"
