"""Programs that start something and then wait to be killed, and whether what they started is still there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def python(source: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a piece of Python that prints and then waits; its standard output is a pipe. In the end it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *(os.fspath(argument) for argument in arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        kill(process)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended with code {process.wait()}"
    return line.strip()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait for the end."""
    process.kill()
    finish(process)


def finish(process: subprocess.Popen[str]) -> int:
    """Close its pipes, which ends what it waits for; the exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    return process.wait()


def is_running(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be collected by its parent."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
