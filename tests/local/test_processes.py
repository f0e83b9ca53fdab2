"""Child processes: a session of their own, an ordered end, and no life without us."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from app.errors import CarillonError
from app.local.processes import Child, log_tail, spawn, stop, stop_all, wait_ended, wait_for_line
from tests.eventually import eventually
from tests.local.launching import is_running, kill, python, read_line

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=50)

WAITS = "import signal; print('ready', flush=True); signal.pause()"
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('ready', flush=True)
while True:
    signal.pause()
"""
ORDERLY = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print('ready', flush=True)
signal.pause()
"""
TELLS = """
import json, os, sys
print('to error', file=sys.stderr, flush=True)
print(json.dumps([os.getsid(0), dict(os.environ)]))
"""

SPAWN_AND_WAIT = """
import signal, sys
from pathlib import Path
from app.local.processes import spawn
child = spawn([sys.executable, "-c", "import signal; signal.pause()"], env={}, log_path=Path(sys.argv[1]))
print(child.pid, flush=True)
sys.stdin.read()
"""

Start = Callable[[str], Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Child] = []

    def start(source: str) -> Child:
        log_path = tmp_path / f"{len(started)}.log"
        started.append(spawn([sys.executable, "-c", source], env={"PLACE": "here"}, log_path=log_path))
        return started[-1]

    yield start
    for child in started:
        child.process.kill()
        child.process.wait()


async def test_a_child_has_its_own_session_its_own_environment_and_a_log(start: Start) -> None:
    child = start(TELLS)
    assert await wait_ended(child) == 0
    error, output = child.log_path.read_text().splitlines()
    assert error == "to error"
    session, environment = json.loads(output)
    assert session == child.pid
    assert environment.pop("PLACE") == "here"
    assert set(environment) <= {"LC_CTYPE"}  # Python sets this one itself


async def test_output_is_added_to_a_log_that_is_there_already(start: Start, tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("earlier\n")
    child = start("print('later')")
    await wait_ended(child)
    assert child.log_path.read_text() == "earlier\nlater\n"


async def test_stop_lets_a_child_end_in_its_own_way(start: Start) -> None:
    child = start(ORDERLY)
    await wait_for_line(child, "ready", within=LONG)
    assert stop(child, grace=LONG) == 7


async def test_stop_kills_a_child_that_does_not_end_within_the_grace(start: Start) -> None:
    child = start(STUBBORN)
    await wait_for_line(child, "ready", within=LONG)
    assert stop(child, grace=SHORT) == -signal.SIGKILL


async def test_stop_of_a_child_that_has_ended_gives_its_code(start: Start) -> None:
    child = start("raise SystemExit(3)")
    await wait_ended(child)
    assert stop(child, grace=LONG) == 3
    assert stop(child, grace=LONG) == 3


async def test_several_children_are_all_told_before_any_is_waited_for(start: Start) -> None:
    stubborn, orderly, ended = start(STUBBORN), start(ORDERLY), start("")
    for child in (stubborn, orderly):
        await wait_for_line(child, "ready", within=LONG)
    await wait_ended(ended)
    # The stubborn one uses up the whole grace; the orderly one has its signal and its own end all the same.
    assert stop_all([stubborn, orderly, ended], grace=timedelta(seconds=1)) == [-signal.SIGKILL, 7, 0]


async def test_waiting_for_the_end_wakes_up_when_the_child_is_killed(start: Start) -> None:
    child = start(WAITS)
    await wait_for_line(child, "ready", within=LONG)
    os.kill(child.pid, signal.SIGKILL)
    assert await wait_ended(child) == -signal.SIGKILL
    assert await wait_ended(child) == -signal.SIGKILL


async def test_a_line_is_waited_for_and_its_rest_returned(start: Start) -> None:
    child = start(
        "print('noise'); print('listening http://here ', flush=True); import signal; signal.pause()"
    )
    assert await wait_for_line(child, "listening ", within=LONG) == "http://here"


async def test_a_line_that_was_written_just_before_the_end_is_found(start: Start) -> None:
    child = start("print('listening there')")
    await wait_ended(child)
    assert await wait_for_line(child, "listening ", within=LONG) == "there"


async def test_waiting_for_a_line_of_a_child_that_ended_shows_why_it_ended(start: Start) -> None:
    child = start("raise SystemExit('no such database')")
    with pytest.raises(CarillonError, match=r"ended with code 1:\nno such database"):
        await wait_for_line(child, "listening ", within=LONG)


async def test_waiting_for_a_line_is_bounded_and_shows_the_log(start: Start) -> None:
    child = start(WAITS)
    await wait_for_line(child, "ready", within=LONG)
    with pytest.raises(CarillonError, match=r"did not say 'listening ' in 0.05 s:\nready"):
        await wait_for_line(child, "listening ", within=SHORT)


async def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    with python(SPAWN_AND_WAIT, tmp_path / "log") as parent:
        pid = int(read_line(parent))
        assert is_running(pid)
        kill(parent)
        await eventually(lambda: not is_running(pid))


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CarillonError, match="nowhere could not be started: No such file or directory"):
        spawn([tmp_path / "nowhere"], env={}, log_path=tmp_path / "log")


def test_a_worker_thread_may_not_start_a_child(tmp_path: Path) -> None:
    refused: list[RuntimeError] = []

    def start() -> None:
        try:
            spawn([sys.executable], env={}, log_path=tmp_path / "log")
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(refused[0])


def test_a_log_tail_shows_the_last_lines_of_any_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == "(no log)"
    log.write_bytes(b"")
    assert log_tail(log) == "(empty log)"
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert log_tail(log, lines=2) == "two\n\ufffd three"
