"""A PostgreSQL server that starts with one call and ends with us, whatever ends us.

Linux only, loopback TCP only, no password: for development, load and tests, never for production.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from app.errors import CarillonError, ConfigError
from app.local.binaries import FIXED_ENVIRONMENT, find_binaries, make_runnable, read_version, run_program
from app.local.data_folder import DataFolder, close_data_folder, initialise, open_data_folder, read_postmaster
from app.local.processes import die_with_parent, log_tail
from app.local.workspace import close_workspace, open_workspace

HOST = "127.0.0.1"
START_LIMIT = timedelta(seconds=60)
STOP_LIMIT = timedelta(seconds=60)
PORT_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Launch:
    """What a start of `postgres` needs besides its port."""

    binaries: Path
    folder: DataFolder
    settings: Mapping[str, str]
    inherited: tuple[int, ...]
    prepare: Callable[[], None]
    within: timedelta


class EmbeddedPostgres:
    """A running server. `start` it, use `dsn`, then `stop` it (or use it as a context manager)."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        launch: _Launch,
        port: int,
        version: str,
        undo: contextlib.ExitStack,
    ) -> None:
        self.port = port
        self.version = version
        self._process = process
        self._launch = launch
        self._undo = undo
        self._owner = os.getpid()
        atexit.register(self._stop_at_exit)

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
        port: int | None = None,
        temporary_in: Path | None = None,
        within: timedelta = START_LIMIT,
    ) -> Self:
        """Start a server; returns when it accepts connections. Blocking, and only from the main thread.

        `data_dir` keeps the data and may hold that of an earlier run; without it the data goes when the server stops,
        and `temporary_in` is where it is until then (a memory file system, say). `settings` are server settings
        (`{"fsync": "off"}`), `binaries` is a `bin` folder other than the one found by itself, `port` a fixed port
        instead of a free one.

        Raises `ConfigError` when the folder, its version, its owner or a setting does not fit, and `CarillonError`,
        with the end of the server's log, when the server is not ready after `within`.
        """
        prepare = die_with_parent(signal.SIGINT)  # first, since it refuses other systems and other threads
        chosen = dict(settings or {})
        with contextlib.ExitStack() as undo:
            programs = open_workspace()  # apart from the data, whose place may forbid programs (noexec)
            undo.callback(close_workspace, programs)
            home = open_workspace(temporary_in)
            undo.callback(close_workspace, home)
            folder = open_data_folder((data_dir or home.path / "data").resolve())
            undo.callback(close_data_folder, folder)
            runnable = make_runnable(binaries or find_binaries(), user=folder.user, copy_to=programs.path)
            version = read_version(runnable, user=folder.user)
            options = ["--no-sync"] if chosen.get("fsync") == "off" else []
            initialise(folder, binaries=runnable, version=version, initdb_options=options)
            launch = _Launch(
                binaries=runnable,
                folder=folder,
                settings=chosen,
                inherited=(programs.lock, home.lock, folder.lock),
                prepare=prepare,
                within=within,
            )
            process, bound = _launch_on(launch, port) if port is not None else _launch_anywhere(launch)
            return cls(process, launch=launch, port=bound, version=version, undo=undo.pop_all())

    @property
    def dsn(self) -> str:
        """Where the server's own database `postgres` is, as its superuser."""
        return self.dsn_of("postgres")

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """The server's log. It goes with the data when no `data_dir` was given."""
        return self._launch.folder.log_path

    def dsn_of(self, database: str) -> str:
        """The address of one database of this server."""
        return f"postgresql://postgres@{HOST}:{self.port}/{database}"

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database, as a copy of `template`, which nobody may be using; returns its address."""
        self._run_sql('CREATE DATABASE :"name" TEMPLATE :"template";', name=name, template=template)
        return self.dsn_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, with whatever is connected to it; one that does not exist is fine."""
        self._run_sql('DROP DATABASE IF EXISTS :"name" WITH (FORCE);', name=name)

    def stop(self) -> None:
        """Stop cleanly (SIGINT: sessions are ended, a checkpoint is written), then remove what was temporary.

        A server that does not stop is ended the hard way. A second call does nothing.
        """
        atexit.unregister(self._stop_at_exit)
        _end(self._process)
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked copy of us must not end the original's server
            self.stop()

    def _run_sql(self, statement: str, **names: str) -> None:
        variables = [f"--set={key}={value}" for key, value in names.items()]
        psql: list[Path | str] = [
            self._launch.binaries / "psql",
            "-X",
            "-q",
            "--set=ON_ERROR_STOP=1",
            *variables,
            self.dsn,
        ]
        done = run_program(psql, user=self._launch.folder.user, text=statement)
        if done.returncode != 0:
            raise CarillonError(f"PostgreSQL refused: {done.stdout.decode(errors='replace').strip()}")


def _launch_anywhere(launch: _Launch) -> tuple[subprocess.Popen[bytes], int]:
    """Launch on a free port; another process may take it between our look and the server's bind, so try again."""
    for _ in range(PORT_TRIES - 1):
        with contextlib.suppress(_PortTaken):
            return _launch_on(launch, _free_port())
    return _launch_on(launch, _free_port())


def _launch_on(launch: _Launch, port: int) -> tuple[subprocess.Popen[bytes], int]:
    folder, user = launch.folder, launch.folder.user
    fixed = {"listen_addresses": HOST, "port": str(port), "unix_socket_directories": "", "lc_messages": "C"}
    settings = [f"--{name}={value}" for name, value in {**launch.settings, **fixed}.items()]
    with folder.log_path.open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [os.fspath(launch.binaries / "postgres"), "-D", os.fspath(folder.pgdata), *settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=FIXED_ENVIRONMENT,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
            start_new_session=True,
            pass_fds=launch.inherited,
            preexec_fn=launch.prepare,  # noqa: PLW1509 - two system calls, no lock taken
        )
    try:
        _wait_ready(process, launch, log_begin=begin)
    except BaseException:
        _end(process)
        raise
    return process, port


def _wait_ready(process: subprocess.Popen[bytes], launch: _Launch, *, log_begin: int) -> None:
    deadline = time.monotonic() + launch.within.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.01)
            said = launch.folder.log_path.read_bytes()[log_begin:].decode(errors="replace").strip()
            kind = _PortTaken if "Address already in use" in said else ConfigError
            raise kind(f"PostgreSQL ended at its start with code {code}:\n{said[-4000:]}")
        running = read_postmaster(launch.folder.pgdata)
        if running is not None and running.pid == process.pid and running.status == "ready":
            return
    seconds = launch.within.total_seconds()
    raise CarillonError(f"PostgreSQL was not ready after {seconds:g} s:\n{log_tail(launch.folder.log_path)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Fast shutdown, then immediate shutdown, then SIGKILL; signals go to this process only."""
    for step, limit in ((signal.SIGINT, STOP_LIMIT), (signal.SIGQUIT, timedelta(seconds=10))):
        process.send_signal(step)  # does nothing once the process's end is known
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit.total_seconds())
            return
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class _PortTaken(ConfigError):
    """The port is in use."""
