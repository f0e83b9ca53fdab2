"""Child processes that can never outlive us.

Every child gets its own session (a Ctrl-C in the terminal reaches only us, and we decide what ends when) and the
kernel's parent-death signal, which also works when we are killed by SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from app.errors import CarillonError, ConfigError

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h; see prctl(2)."""

TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Child:
    """A process started by `spawn`; its output, both streams, is in `log_path`."""

    process: subprocess.Popen[bytes]
    name: str
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid


def spawn(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    log_path: Path,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Child:
    """Start a child in its own session; output is appended to `log_path`, `env` is its whole environment.

    The child gets `death_signal` when we end in whatever way. Only the main thread may call this: the kernel
    sends that signal when the *thread* that started the child ends (prctl(2)), so the end of a worker thread
    would end the child.

    Raises `CarillonError` when the program cannot be started.
    """
    prepare = die_with_parent(death_signal)
    name = Path(argv[0]).name
    try:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [os.fspath(part) for part in argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - our pre-exec makes two system calls and takes no lock
            )
    except OSError as error:
        raise CarillonError(f"{name} could not be started: {error.strerror or error}") from error
    return Child(process=process, name=name, log_path=log_path)


def die_with_parent(death_signal: signal.Signals) -> Callable[[], None]:
    """The `preexec_fn` of a child that must end with us. It runs after subprocess has changed the user.

    (Changing the user clears the setting, so the order matters; prctl(2).)

    Raises `ConfigError` where the kernel has no such signal.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"child processes that end with their parent need Linux, this is {sys.platform}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children are started from the main thread: the parent-death signal is per thread")
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        if libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
            os._exit(127)
        if os.getppid() != parent:  # we ended between fork and prctl: nobody would send the signal any more
            os._exit(127)

    return prepare


def end_with_parent(death_signal: signal.Signals) -> None:
    """Ask the kernel to send us `death_signal` when the process (its thread) that started us ends.

    For programs that may be started by something other than `spawn`. A parent that has ended already is not noticed.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise CarillonError(f"prctl failed: {os.strerror(ctypes.get_errno())}")


def stop(child: Child, *, grace: timedelta) -> int:
    """SIGTERM, then SIGKILL after `grace`. Returns the exit code; a child that has ended already is fine."""
    return stop_all([child], grace=grace)[0]


def stop_all(children: Iterable[Child], *, grace: timedelta) -> list[int]:
    """Stop several children within one common `grace`; exit codes in their order."""
    stopping = list(children)
    for child in stopping:
        child.process.send_signal(signal.SIGTERM)  # does nothing to a child whose end is known
    deadline = time.monotonic() + grace.total_seconds()
    for child in stopping:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in stopping:
        if child.process.poll() is None:
            child.process.kill()
    return [child.process.wait() for child in stopping]


async def wait_ended(child: Child) -> int:
    """Wait without a thread until the child has ended; its exit code, negative for a signal."""
    code = child.process.poll()
    if code is not None:
        return code
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(child.pid)  # safe against a recycled pid: the child has not been waited for
    try:
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
    finally:
        os.close(pidfd)
    return child.process.wait()


async def wait_for_line(child: Child, beginning: str, *, within: timedelta) -> str:
    """The rest of the first line of the child's log that starts with `beginning`.

    Raises `CarillonError`, with the end of the log, when the child ends first or the time is over.
    """
    deadline = time.monotonic() + within.total_seconds()
    while True:
        ended = child.process.poll() is not None
        for line in _complete_lines(child.log_path):
            if line.startswith(beginning):
                return line[len(beginning) :].strip()
        if ended:
            code = child.process.returncode
            raise CarillonError(f"{child.name} ended with code {code}:\n{log_tail(child.log_path)}")
        if time.monotonic() > deadline:
            waited = f"{within.total_seconds():g} s"
            raise CarillonError(
                f"{child.name} did not say {beginning!r} in {waited}:\n{log_tail(child.log_path)}"
            )
        await asyncio.sleep(0.02)


def log_tail(log_path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for an error message."""
    try:
        text = log_path.read_bytes()[-64 * 1024 :].decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(empty log)"


def _complete_lines(log_path: Path) -> list[str]:
    text = log_path.read_bytes().decode(errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()
