"""Connections to PostgreSQL: bounded waits, one time zone, and one translation of the driver's errors.

Everything above the store sees the classes of `app.errors`, never asyncpg's. A session of ours never waits
without a bound: the server ends statements, lock waits and forgotten transactions, the client ends calls to a
server that has gone silent, and `acquire` ends the wait for a free connection.

The pool hands connections on without a reset query (123 instead of 190 µs per use), so **nobody may change
the state of a session**: no SET (SET LOCAL is fine), no session advisory lock, no LISTEN, no temporary table.
What a session needs is passed as `settings` when it is opened. An open transaction is ended all the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from asyncpg.transaction import Transaction

from app.errors import ConfigError, Conflict, PartitionMissing, RowRefused, StoreError, StoreUnavailable

if TYPE_CHECKING:
    Row: TypeAlias = asyncpg.Record
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    Row = asyncpg.Record
    Pool = asyncpg.Pool
    Connection = asyncpg.Connection | PoolConnectionProxy

CONNECT_TIMEOUT: Final = timedelta(seconds=10)
COMMAND_TIMEOUT: Final = timedelta(seconds=20)
"""Longer than the server's statement_timeout: it is there for a server that does not answer at all."""
ACQUIRE_TIMEOUT: Final = timedelta(seconds=5)
RELEASE_TIMEOUT: Final = timedelta(seconds=5)
CLOSE_TIMEOUT: Final = timedelta(seconds=5)
USES_PER_CONNECTION: Final = 1_000_000
"""A connection is replaced after this many queries, so that a backend's caches do not grow for ever."""

SESSION: Final[Mapping[str, str]] = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "default_transaction_isolation": "read committed",  # the level the claim's re-check was proven under
    "statement_timeout": "15s",
    "lock_timeout": "2s",
    "idle_in_transaction_session_timeout": "5s",  # a frozen replica holds no lock for longer
    "jit": "off",
}

PLAN_GUARDS: Final[Mapping[str, str]] = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
"""For the connections of claims, planner and settling, and nothing else: 2 to 3 ms per claim of 100 whatever the
statistics say. Without them a partition that was never analysed costs 85 to 125 ms, a generic plan 15 to
24."""

DRIVER_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What asyncpg raises when a call fails (TimeoutError is an OSError), apart from the caller's own
mistakes."""


async def create_pool(
    dsn: str,
    *,
    size: int,
    application_name: str,
    settings: Mapping[str, str] | None = None,
    min_size: int = 1,
    command_timeout: timedelta = COMMAND_TIMEOUT,
) -> Pool:
    """Open a pool of at most `size` connections; `min_size` of them are opened now and kept.

    `settings` are session settings on top of (and stronger than) SESSION, for example PLAN_GUARDS.
    Raises ConfigError for a connection URL that cannot be read, StoreUnavailable when `min_size` is not 0 and
    the database cannot be reached within CONNECT_TIMEOUT. Close it with `close_pool`.
    """
    with translated(), _readable_dsn():
        return await asyncpg.create_pool(
            dsn,
            min_size=min(min_size, size),
            max_size=size,
            max_queries=USES_PER_CONNECTION,
            connect=_connect_undisturbed,
            reset=_keep_session,
            max_cached_statement_lifetime=0,
            timeout=CONNECT_TIMEOUT.total_seconds(),
            command_timeout=command_timeout.total_seconds(),
            server_settings={**SESSION, "application_name": application_name, **(settings or {})},
        )


async def close_pool(pool: Pool) -> None:
    """Close the pool: in peace within CLOSE_TIMEOUT, by force after it. Never raises for a database that is
    gone."""
    with suppress(*DRIVER_ERRORS):
        async with asyncio.timeout(CLOSE_TIMEOUT.total_seconds()):
            await pool.close()


async def connect(
    dsn: str,
    *,
    application_name: str,
    settings: Mapping[str, str] | None = None,
    command_timeout: timedelta = COMMAND_TIMEOUT,
) -> Connection:
    """Open one connection outside any pool; its owner closes it with `close`. Errors as in `create_pool`."""
    with translated(), _readable_dsn():
        return await _connect_undisturbed(
            dsn,
            max_cached_statement_lifetime=0,
            timeout=CONNECT_TIMEOUT.total_seconds(),
            command_timeout=command_timeout.total_seconds(),
            server_settings={**SESSION, "application_name": application_name, **(settings or {})},
        )


async def close(connection: Connection) -> None:
    """Close a connection made by `connect`: in peace within CLOSE_TIMEOUT, by force after it. Never
    raises."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT.total_seconds())
    except DRIVER_ERRORS:
        connection.terminate()


@asynccontextmanager
async def acquire(pool: Pool, *, timeout: timedelta = ACQUIRE_TIMEOUT) -> AsyncIterator[Connection]:
    """Lend a connection of the pool. Raises StoreUnavailable when none is free (or can be opened) within
    `timeout`."""
    with translated():
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                connection = await pool.acquire()
        except TimeoutError as error:
            seconds = timeout.total_seconds()
            raise StoreUnavailable(f"no database connection was free within {seconds:g} s") from error
        try:
            yield connection
        finally:
            # A connection that cannot be given back is closed by the pool; that must not hide the body's own
            # end, least of all a cancellation. The release itself is shielded by the pool.
            with suppress(*DRIVER_ERRORS):
                await pool.release(connection, timeout=RELEASE_TIMEOUT.total_seconds())


@asynccontextmanager
async def transaction(pool: Pool, *, timeout: timedelta = ACQUIRE_TIMEOUT) -> AsyncIterator[Connection]:
    """Lend a connection inside a transaction: committed when the block ends, rolled back when it raises.

    A StoreUnavailable out of the end of the block may mean that the commit happened and its answer was lost.
    """
    async with acquire(pool, timeout=timeout) as connection:
        current = connection.transaction()
        try:
            await current.start()
            yield connection
            await current.commit()
        except BaseException:
            await _roll_back(connection, current)
            raise


@contextmanager
def translated() -> Iterator[None]:
    """Turn the driver's errors into ours. Only database calls belong inside: any OSError counts as a lost
    database."""
    try:
        yield
    except StoreError:
        raise
    except asyncpg.PostgresError as error:
        ours = _of_server(error)
        if ours is None:
            raise
        if isinstance(ours, StoreUnavailable):
            raise ours from error
        raise ours from None  # the server's text and detail quote the row
    except (asyncpg.DataError, UnicodeEncodeError) as error:
        raise RowRefused(_of_argument(error)) from None
    except asyncpg.InterfaceError as error:
        if not _is_connection_gone(error):
            raise
        raise StoreUnavailable(f"the database connection is gone: {error}") from error
    except asyncpg.InternalClientError as error:
        # Also what a session says that the server ended a moment ago, before its connection is seen to be closed.
        raise StoreUnavailable(f"the database connection is out of step: {error}") from error
    except TimeoutError as error:
        raise StoreUnavailable("the database did not answer in time") from error
    except OSError as error:
        raise StoreUnavailable(f"the database cannot be reached: {error}") from error


# SQLSTATE classes and codes (PostgreSQL manual, appendix A) that say "not now" or "again": lost connections,
# refused log-ins, cursors and transactions ended by time-outs, read-only and recovering servers, deadlocks,
# missing resources, locks not available, cancelled and shut-down sessions, faults of the server's disk.
UNAVAILABLE_CLASSES: Final = frozenset({"08", "28", "40", "53", "57", "58"})
UNAVAILABLE_CODES: Final = frozenset({"0A000", "25006", "25P03", "25P04", "3D000", "55006", "55P03"})
CACHED_PLAN: Final = "0A000"
REFUSED_CLASSES: Final = frozenset({"22", "23", "54"})
UNIQUE_VIOLATION: Final = "23505"
CHECK_VIOLATION: Final = "23514"


def _of_server(error: asyncpg.PostgresError) -> StoreError | None:
    """Ours for the server's error; None for what is a fault of our own code (syntax, a missing column)."""
    code = error.sqlstate or ""
    if code == UNIQUE_VIOLATION:
        return Conflict(f"exists already ({_place_of(error)})")
    if code == CHECK_VIOLATION and not error.constraint_name:
        # Both a missing partition and a row outside its partition: the only check violations without a
        # constraint. The text would say it too, but in the server's language.
        return PartitionMissing(f"no partition for this row ({_place_of(error)})")
    if code[:2] in REFUSED_CLASSES:
        return RowRefused(f"refused with SQLSTATE {code} {type(error).__name__} ({_place_of(error)})")
    if code == CACHED_PLAN and not isinstance(error, asyncpg.InvalidCachedStatementError):
        return None
    if code[:2] in UNAVAILABLE_CLASSES or code in UNAVAILABLE_CODES:
        return StoreUnavailable(f"the database answered {code}: {error.args[0] if error.args else code}")
    return None


def _place_of(error: asyncpg.PostgresError) -> str:
    """Table, column and constraint, as far as the server names them; never a value."""
    named = {"table": error.table_name, "column": error.column_name, "constraint": error.constraint_name}
    return ", ".join(f"{kind} {name}" for kind, name in named.items() if name) or "place not named"


def _of_argument(error: Exception) -> str:
    """Which argument the driver could not encode. Its own text quotes the value, so it is not repeated."""
    found = re.search(r"query argument (\$\d+)", str(error))
    return f"argument {found.group(1)} cannot be sent" if found else "an argument cannot be sent"


def _is_connection_gone(error: asyncpg.InterfaceError) -> bool:
    """asyncpg has one class for a lost connection and for wrong use of it; only the text tells them apart.

    "released" is said of a pooled connection that was lost between two calls: the pool takes it back at once.
    """
    text = str(error)
    return any(word in text for word in ("closed", "closing", "released back to the pool"))


_unwanted: Final[set[asyncio.Task[asyncpg.Connection[Row]]]] = set()
"""Log-ins whose taker has gone, each ending within CONNECT_TIMEOUT. (The event loop itself forgets its tasks.)"""


async def _connect_undisturbed(*args: Any, **kwargs: Any) -> asyncpg.Connection[Row]:
    """asyncpg.connect, but a cancelled taker does not cancel the log-in: it goes on alone and is closed at its end.

    Cancelled halfway, asyncpg loses track of the socket: the loop then reports an error that nobody can catch, and
    the server keeps a session until it notices.
    """
    attempt = asyncio.ensure_future(asyncpg.connect(*args, **kwargs))
    try:
        return await asyncio.shield(attempt)
    except asyncio.CancelledError:
        _unwanted.add(attempt)
        attempt.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(attempt: asyncio.Task[asyncpg.Connection[Row]]) -> None:
    _unwanted.discard(attempt)
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


async def _roll_back(connection: Connection, current: Transaction) -> None:
    """Roll back, or close the connection when that is not certain: its locks end with either."""
    rolled_back = False
    try:
        with suppress(*DRIVER_ERRORS):
            await current.rollback()
            rolled_back = True
    finally:
        if not rolled_back:
            with suppress(asyncpg.InterfaceError):  # the pool has noticed a lost connection itself
                connection.terminate()


@contextmanager
def _readable_dsn() -> Iterator[None]:
    """A connection URL that cannot be read is a wrong setting; not repeated here, it may hold a password."""
    try:
        yield
    except asyncpg.DataError:
        raise
    except ValueError:
        wanted = "postgresql://user:password@host:port/database"
        raise ConfigError(f"the database URL cannot be read; the form is {wanted}") from None


async def _keep_session(_connection: object) -> None:
    """The pool's reset: nothing to undo, because nobody changes the state of a session."""
