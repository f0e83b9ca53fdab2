"""The receiver as a process of its own: its ledger file, its answers, its end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from app.local.answers import Hang, Reply
from app.local.ledger import LedgerLine, read_ledger
from app.local.processes import Child, spawn, stop, wait_ended, wait_for_line
from app.local.receiver import parse_answer
from tests.eventually import eventually
from tests.local.launching import is_running, kill, python, read_line

LONG = timedelta(seconds=60)

START_AND_WAIT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "app.local.receiver"], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "app.local.receiver",
        "--ledger",
        tmp_path / "ledger.jsonl",
    ]
    answers = ["--answer", "/flaky=503,200", "--answer", "/slow=202@5"]
    started = spawn([*argv, *answers], env=os.environ, log_path=tmp_path / "log")
    yield started
    stop(started, grace=LONG)


async def test_it_says_where_it_listens_writes_down_what_arrives_and_ends_when_told(
    child: Child, tmp_path: Path
) -> None:
    url = await wait_for_line(child, "listening ", within=LONG)
    statuses: list[int] = []
    async with aiohttp.ClientSession() as client:
        for path, attempt in (("/flaky?ü=1", 1), ("/flaky", 2), ("/slow", 1)):
            headers = {"webhook-id": f'id"{path[:5]}', "carillon-attempt": str(attempt)}
            async with client.post(url + path, headers=headers, data=b"four") as answer:
                statuses.append(answer.status)
        lines = list(read_ledger(tmp_path / "ledger.jsonl"))
    assert statuses == [503, 200, 202]
    assert [(line.delivery_id, line.attempt, line.size, line.method) for line in lines] == [
        ('id"/flak', 1, 4, "POST"),
        ('id"/flak', 2, 4, "POST"),
        ('id"/slow', 1, 4, "POST"),
    ]
    assert lines[0].path == "/flaky?%C3%BC=1"
    assert lines[0].run_id is None
    assert 0 < lines[0].arrived_ns < lines[1].arrived_ns
    assert stop(child, grace=LONG) == 0


async def test_what_it_wrote_down_stays_when_it_is_killed(child: Child, tmp_path: Path) -> None:
    url = await wait_for_line(child, "listening ", within=LONG)
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        await answer.read()
        os.kill(child.pid, signal.SIGKILL)
        await wait_ended(child)
    assert len(list(read_ledger(tmp_path / "ledger.jsonl"))) == 1


async def test_it_ends_with_a_killed_parent_however_it_was_started() -> None:
    with python(START_AND_WAIT) as parent:
        pid, said, _url = read_line(parent).split()
        assert said == "listening"
        kill(parent)
        await eventually(lambda: not is_running(int(pid)))


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    line = (
        b'{"delivery_id":"a","run_id":null,"attempt":1,"method":"GET","path":"/","size":0,"arrived_ns":5}\n'
    )
    (tmp_path / "ledger").write_bytes(line + line[:20])
    assert list(read_ledger(tmp_path / "ledger")) == [LedgerLine("a", None, 1, "GET", "/", 0, 5)]


def test_answers_are_read_from_the_command_line() -> None:
    after = timedelta(milliseconds=250)
    assert parse_answer("/a=b=503,200@250") == ("/a=b", (Reply(503, delay=after), Reply(200, delay=after)))
    assert parse_answer("/dead=hang") == ("/dead", (Hang(),))


@pytest.mark.parametrize(
    "text", ["", "200", "a=200", "/a=", "/a=2o0", "/a=99", "/a=600", "/a=200@soon", "/a=200,"]
)
def test_a_wrong_answer_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"is not /PREFIX=ANSWER|allowed are 200 to 599, or hang"
    ):
        parse_answer(text)
