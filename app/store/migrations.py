"""The schema's history: numbered SQL files, each applied once, in order, and never changed afterwards.

`migrations/NNNN_what.sql`, forward only. Each file runs in one transaction with a short lock_timeout (a
schema change that waits for a lock makes everybody else wait behind it), repeated a few times. A file whose
first line is `-- no transaction` holds exactly one statement that cannot run in a transaction (CREATE INDEX
CONCURRENTLY … IF NOT EXISTS) and must be safe to run again.

Only one migrator works at a time. The lock is polled, not waited for: a session that waits in
pg_advisory_lock holds a snapshot, for which the other's CREATE INDEX CONCURRENTLY waits in turn. It is taken
before the bookkeeping table is made, because CREATE TABLE IF NOT EXISTS is not safe against itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final

import asyncpg

from app.errors import SchemaMismatch, StoreUnavailable
from app.store import partitions
from app.store.pool import Connection, close, connect, translated

LOCK_POLL: Final = timedelta(milliseconds=200)
LOCK_WAIT: Final = timedelta(seconds=60)
"""How long a migrator waits for another one."""
TRIES: Final = 5
"""How often a file is begun anew when it cannot get its locks."""
STATEMENT_LIMIT: Final = timedelta(hours=1)
MONTHS_AHEAD: Final = 3
"""A fresh installation can plan at once; from then on maintenance keeps the months ahead."""

MIGRATOR_SESSION: Final = {"statement_timeout": "1h", "idle_in_transaction_session_timeout": "60s"}

FILE_NAME: Final = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
DUMP: Final = "schema.sql"
NO_TRANSACTION: Final = "-- no transaction"
TRANSACTION_CONTROL: Final = re.compile(r"^\s*(COMMIT|ROLLBACK|BEGIN|START\s+TRANSACTION)\s*;", re.I | re.M)
INDEX_NAME: Final = re.compile(r"INDEX\s+CONCURRENTLY\s+(?:IF\s+NOT\s+EXISTS\s+)?(\w+)\s+ON\b", re.I)


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of the history; `sha256` is that of its text with line ends as \\n."""

    version: int
    name: str
    text: str
    sha256: bytes


class State(StrEnum):
    APPLIED = "applied"
    PENDING = "pending"
    EDITED = "edited"
    """Applied, but the file's text is another one now."""
    UNKNOWN = "unknown"
    """Applied, but this version of Carillon has no such file."""


@dataclass(frozen=True, slots=True)
class MigrationState:
    version: int
    name: str
    state: State
    applied_at: datetime | None


def folder() -> Path:
    """Where the files are: inside the installed package, or one folder up in a source tree."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "migrations", package.parent / "migrations"):
        if place.is_dir():
            return place
    raise SchemaMismatch("the migrations folder is missing from this installation")


def read_history(place: Path) -> list[Migration]:
    """The files in order. Raises SchemaMismatch for a gap, a number used twice, or a name that has none."""
    history: list[Migration] = []
    for path in sorted(place.glob("*.sql")):
        if path.name == DUMP:
            continue
        named = FILE_NAME.fullmatch(path.name)
        if named is None:
            raise SchemaMismatch(f"migrations/{path.name}: the name must look like 0001_what_it_does.sql")
        text = path.read_text(encoding="utf-8")
        digest = hashlib.sha256(text.encode()).digest()
        history.append(Migration(int(named.group(1)), path.name, text, digest))
    for expected, migration in enumerate(history, start=1):
        if migration.version != expected:
            fault = "is used twice" if migration.version < expected else f"comes without {expected:04}"
            raise SchemaMismatch(f"migrations/{migration.name}: the number {migration.version:04} {fault}")
    return history


async def apply_all(dsn: str, *, place: Path | None = None) -> list[int]:
    """Bring the database up to date and make the months ahead; return the versions applied by this call.

    Any number of callers may do this at once: one works, the others wait (LOCK_WAIT) and find nothing to do.
    Raises SchemaMismatch when the history does not fit or a file fails (nothing of that file is left then,
    unless it runs without a transaction), StoreUnavailable when the database or its locks cannot be had in
    time.
    """
    history = read_history(place or folder())
    conn = await connect(
        dsn, application_name="carillon migrate", settings=MIGRATOR_SESSION, command_timeout=STATEMENT_LIMIT
    )
    try:
        async with _only_migrator(conn):
            await _make_bookkeeping(conn)
            done = await _read_applied(conn)
            _refuse_misfit(_compare(history, done))
            pending = history[len(done) :]
            for migration in pending:
                await _apply(conn, migration)
            await partitions.ensure_ahead(conn, months=MONTHS_AHEAD)
            return [migration.version for migration in pending]
    finally:
        await close(conn)


async def status(dsn: str, *, place: Path | None = None) -> list[MigrationState]:
    """Every known and every applied migration, in order. Changes nothing."""
    history = read_history(place or folder())
    conn = await connect(dsn, application_name="carillon migrate status")
    try:
        return _compare(history, await _read_applied(conn))
    finally:
        await close(conn)


async def require_current(database: str | Connection, *, place: Path | None = None) -> None:
    """Raise SchemaMismatch unless the database (a URL or a connection) has exactly this version's schema."""
    if isinstance(database, str):
        states = await status(database, place=place)
    else:
        states = _compare(read_history(place or folder()), await _read_applied(database))
    _refuse_misfit(states)
    _refuse_pending(states)


async def require_contained(conn: Connection, *, place: Path | None = None) -> None:
    """Raise SchemaMismatch unless the database has all of this version's schema, unchanged; it may have more.

    For a replica that runs already: a newer schema is made to serve it too, until it has been replaced.
    """
    states = _compare(read_history(place or folder()), await _read_applied(conn))
    known = [found for found in states if found.state is not State.UNKNOWN]
    _refuse_misfit(known)
    _refuse_pending(known)


def _refuse_pending(states: Sequence[MigrationState]) -> None:
    missing = [found.name for found in states if found.state is State.PENDING]
    if missing:
        raise SchemaMismatch(
            f"the database schema is older than this version of Carillon: {len(missing)} migration(s) are "
            f"not applied, first {missing[0]}; run `carillon migrate`"
        )


@dataclass(frozen=True, slots=True)
class _Applied:
    version: int
    name: str
    sha256: bytes
    applied_at: datetime


def _compare(history: Sequence[Migration], done: Sequence[_Applied]) -> list[MigrationState]:
    known = {migration.version: migration for migration in history}
    states: list[MigrationState] = []
    for row in done:
        migration = known.pop(row.version, None)
        if migration is None:
            state = State.UNKNOWN
        elif migration.sha256 != row.sha256:
            state = State.EDITED
        else:
            state = State.APPLIED
        states.append(MigrationState(row.version, row.name, state, row.applied_at))
    states += [MigrationState(left.version, left.name, State.PENDING, None) for left in known.values()]
    return sorted(states, key=lambda found: found.version)


def _refuse_misfit(states: Sequence[MigrationState]) -> None:
    """Refuse a database with another past: newer, edited, or with a hole in it; pending ones may follow."""
    pending: MigrationState | None = None
    for found in states:
        match found.state:
            case State.UNKNOWN:
                raise SchemaMismatch(
                    f"the database schema is newer than this version of Carillon: it has {found.name}, "
                    "which is unknown here; use the version that brought it"
                )
            case State.EDITED:
                raise SchemaMismatch(
                    f"migrations/{found.name} was changed after it was applied; restore it and put the "
                    "change into a new file"
                )
            case State.PENDING:
                pending = pending or found
            case State.APPLIED if pending is not None:
                raise SchemaMismatch(
                    f"the database has {found.name} but not {pending.name}, which comes before it"
                )
            case State.APPLIED:
                pass


TRY_LOCK = "SELECT pg_try_advisory_lock(4919231476)"


@asynccontextmanager
async def _only_migrator(conn: Connection) -> AsyncIterator[None]:
    """Hold the migrators' lock; it ends with the connection, which is the caller's own."""
    deadline = asyncio.get_running_loop().time() + LOCK_WAIT.total_seconds()
    with translated():
        while not await conn.fetchval(TRY_LOCK):
            if asyncio.get_running_loop().time() >= deadline:
                waited = LOCK_WAIT.total_seconds()
                raise StoreUnavailable(f"another migration has been running for more than {waited:g} s")
            await asyncio.sleep(LOCK_POLL.total_seconds())
    yield


MAKE_BOOKKEEPING = """
CREATE TABLE IF NOT EXISTS schema_migration (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    sha256     bytea NOT NULL,
    applied_at timestamptz NOT NULL
)
"""


async def _make_bookkeeping(conn: Connection) -> None:
    with translated():
        await conn.execute(MAKE_BOOKKEEPING)


HAS_BOOKKEEPING = "SELECT to_regclass('schema_migration') IS NOT NULL"
READ_APPLIED = "SELECT version, name, sha256, applied_at FROM schema_migration ORDER BY version"


async def _read_applied(conn: Connection) -> list[_Applied]:
    with translated():
        if not await conn.fetchval(HAS_BOOKKEEPING):
            return []
        rows = await conn.fetch(READ_APPLIED)
    return [_Applied(row["version"], row["name"], row["sha256"], row["applied_at"]) for row in rows]


RECORD = "INSERT INTO schema_migration (version, name, sha256, applied_at) VALUES ($1, $2, $3, now())"


async def _apply(conn: Connection, migration: Migration) -> None:
    """Run one file and record it. Raises SchemaMismatch with the file's name, the line and the server's
    words."""
    try:
        with translated():
            if migration.text.startswith(NO_TRANSACTION):
                await _apply_bare(conn, migration)
            else:
                await _apply_in_transaction(conn, migration)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"migrations/{migration.name}: {error}") from error


async def _apply_in_transaction(conn: Connection, migration: Migration) -> None:
    if TRANSACTION_CONTROL.search(migration.text):
        raise SchemaMismatch(
            f"migrations/{migration.name}: a file runs in one transaction and must not end it"
        )
    for turn in range(1, TRIES + 1):
        try:
            async with conn.transaction():
                await conn.execute(RECORD, migration.version, migration.name, migration.sha256)
                await _run_text(conn, migration)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            if turn == TRIES:
                raise
            await asyncio.sleep(turn * LOCK_POLL.total_seconds())
        else:
            return


NO_LOCK_TIMEOUT = "SET lock_timeout = 0"
SHORT_LOCK_TIMEOUT = "SET lock_timeout = '2s'"
DROP_INVALID_INDEX = """
SELECT format('DROP INDEX CONCURRENTLY %s', indexrelid::regclass)
FROM pg_index WHERE indexrelid = to_regclass($1::text) AND NOT indisvalid
"""


async def _apply_bare(conn: Connection, migration: Migration) -> None:
    """One statement outside a transaction, recorded afterwards; what an interrupted earlier try left is
    dropped first.

    It takes no lock that makes others wait, but waits for every older transaction: without a lock_timeout,
    because a time-out would throw the whole build away.
    """
    await conn.execute(NO_LOCK_TIMEOUT)  # this connection is the migrator's own
    index = INDEX_NAME.search(migration.text)
    if index is not None:
        drop = await conn.fetchval(DROP_INVALID_INDEX, index.group(1))
        if drop is not None:
            await conn.execute(drop)
    await _run_text(conn, migration)
    await conn.execute(RECORD, migration.version, migration.name, migration.sha256)
    await conn.execute(SHORT_LOCK_TIMEOUT)


async def _run_text(conn: Connection, migration: Migration) -> None:
    try:
        await conn.execute(migration.text)
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.PostgresConnectionError):
        raise
    except asyncpg.PostgresError as error:
        # The text is ours, not a tenant's: the server's whole answer may be shown.
        position = error.position
        line = migration.text.count("\n", 0, int(position) - 1) + 1 if position else None
        where = f"migrations/{migration.name}" + (f", line {line}" if line else "")
        raise SchemaMismatch(f"{where}: {error}; this file was not applied") from error
