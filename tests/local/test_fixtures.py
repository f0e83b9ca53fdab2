"""The fixtures themselves: databases of their own, a clock that stands still, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.store.migrations import State, status
from app.store.pool import Connection, Pool, acquire
from tests.frozen import FrozenClock

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_has_a_database_of_its_own(db: Connection, turn: int) -> None:
    await db.execute("CREATE TABLE mark (turn integer)")
    await db.execute("INSERT INTO mark VALUES ($1)", turn)
    assert await db.fetchval("SELECT array_agg(turn) FROM mark") == [turn]


async def test_pool_and_connection_see_the_same_migrated_database(db: Connection, pool: Pool) -> None:
    async with acquire(pool) as conn:
        assert await conn.fetchval("SELECT current_database()") == await db.fetchval(
            "SELECT current_database()"
        )
        assert (
            await conn.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'job_run'::regclass") >= 4
        )


async def test_a_suite_can_run_on_each_server(each_server_db: Connection) -> None:
    assert await each_server_db.fetchval("SELECT count(*) FROM schema_migration") > 0


async def test_an_empty_database_has_no_schema(empty_dsn: str) -> None:
    assert {found.state for found in await status(empty_dsn)} == {State.PENDING}


async def test_the_frozen_clock_moves_only_when_told(frozen_clock: FrozenClock, db: Connection) -> None:
    at = datetime(2031, 3, 30, 0, 59, 59, tzinfo=UTC)
    await frozen_clock.set(at)
    async with acquire(frozen_clock.pool) as conn:
        assert await conn.fetchval("SELECT now()") == at
        assert await frozen_clock.tick(timedelta(seconds=2)) == at + timedelta(seconds=2)
        assert await conn.fetchval("SELECT now()") == at + timedelta(seconds=2)
        assert await conn.fetchval("SELECT clock_timestamp()") != at
    assert await db.fetchval("SELECT now()") != at


LEAVING = """
import asyncio, subprocess, sys

keep: list[object] = []


async def test_loses_an_exception() -> None:
    async def fail() -> None:
        raise ValueError("lost")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    del task


async def test_leaves_a_task() -> None:
    keep.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))


def test_leaves_a_child() -> None:
    keep.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


async def test_leaves_nothing() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
"""


def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    case = tmp_path / "test_case.py"
    case.write_text(LEAVING)
    argv: list[str | Path] = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-rE"]
    argv += ["-p", "tests.conftest", "-p", "no:cacheprovider", case]
    done = subprocess.run(argv, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    said = done.stdout
    assert done.returncode == 1, said
    assert "ValueError('lost')" in said
    assert "a task is still running: <Task pending name='forgotten'" in said
    assert "child processes are left: " in said
    failed = {line.split("::")[1].split()[0] for line in said.splitlines() if line.startswith("ERROR ")}
    assert failed == {"test_loses_an_exception", "test_leaves_a_task", "test_leaves_a_child"}, said
