"""Connections: bounded waits, one table of errors, and nothing left behind by a task that was cancelled."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import pytest

from app.errors import ConfigError, Conflict, PartitionMissing, RowRefused, StoreUnavailable
from app.store import pool as pool_module
from app.store.pool import (
    PLAN_GUARDS,
    SESSION,
    Connection,
    Pool,
    acquire,
    close,
    close_pool,
    connect,
    create_pool,
    transaction,
    translated,
)
from tests.eventually import eventually

SECRET = "s3cret-of-a-tenant"
SHORT = timedelta(seconds=0.3)
ADD_TENANT = "INSERT INTO tenant (id, name, created_at) VALUES ($1, $2, now())"
LEAKY = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leaky?'"
HELD = """
SELECT count(*) FROM pg_stat_activity a
WHERE application_name = 'cancelled?'
  AND (state <> 'idle' OR EXISTS (
       SELECT 1 FROM pg_locks l
       WHERE l.pid = a.pid AND l.locktype IN ('relation', 'tuple', 'transactionid')))
"""
COUNT_TENANTS = "SELECT count(*) FROM tenant"
ADD_REQUEST = "INSERT INTO partition_request (month, requested_at) VALUES ($1, now())"


async def test_sessions_have_our_settings_and_those_asked_for(each_server_dsn: str) -> None:
    opened = await create_pool(each_server_dsn, size=1, application_name="guarded", settings=PLAN_GUARDS)
    async with acquire(opened) as conn:
        shown = {
            name: await conn.fetchval("SELECT current_setting($1)", name) for name in (*SESSION, *PLAN_GUARDS)
        }
        assert shown == {**SESSION, **PLAN_GUARDS}
        assert await conn.fetchval("SELECT current_setting('application_name')") == "guarded"
    await close_pool(opened)


async def test_what_is_asked_for_is_stronger_than_our_settings(dsn: str) -> None:
    conn = await connect(dsn, application_name="t", settings={"statement_timeout": "1min"})
    assert await conn.fetchval("SHOW statement_timeout") == "1min"
    await close(conn)


async def test_a_transaction_commits_at_its_end_and_rolls_back_when_its_body_raises(pool: Pool) -> None:
    async with transaction(pool) as conn:
        await conn.execute(ADD_TENANT, uuid4(), "kept")

    async def add_and_fail() -> None:
        async with transaction(pool) as conn:
            await conn.execute(ADD_TENANT, uuid4(), "gone")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await add_and_fail()
    async with acquire(pool) as conn:
        assert [row["name"] for row in await conn.fetch("SELECT name FROM tenant")] == ["kept"]


async def test_a_killed_backend_is_unavailable_and_the_pool_recovers(pool: Pool, db: Connection) -> None:
    async def lose_it() -> None:
        async with transaction(pool) as conn:
            pid = await conn.fetchval("SELECT pg_backend_pid()")
            await db.execute("SELECT pg_terminate_backend($1, 5000)", pid)
            await conn.execute("SELECT pg_sleep(60)")

    with pytest.raises(StoreUnavailable):
        await lose_it()
    async with acquire(pool) as conn:
        assert await conn.fetchval("SELECT 1") == 1


async def test_a_connection_lost_between_two_calls_is_unavailable(pool: Pool, db: Connection) -> None:
    async def lose_it(begin: Callable[[Pool], AbstractAsyncContextManager[Connection]]) -> None:
        async with begin(pool) as conn:
            pid = await conn.fetchval("SELECT pg_backend_pid()")
            await db.execute("SELECT pg_terminate_backend($1, 5000)", pid)
            await eventually(lambda: _is_gone(conn))
            await conn.execute("SELECT 1")

    for begin in (acquire, transaction):
        with pytest.raises(StoreUnavailable):
            await lose_it(begin)


def _is_gone(conn: Connection) -> bool:
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:
        return True


async def test_idle_connections_killed_behind_our_back_are_replaced(pool: Pool, db: Connection) -> None:
    async with acquire(pool) as one, acquire(pool) as two:
        pids = [await conn.fetchval("SELECT pg_backend_pid()") for conn in (one, two)]
    await db.execute("SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) AS pid", pids)

    async def all_answer() -> bool:
        async with acquire(pool) as one, acquire(pool) as two:
            return [await conn.fetchval("SELECT 1") for conn in (one, two)] == [1, 1]

    async def recovered() -> bool:
        try:
            return await all_answer()
        except StoreUnavailable:
            return False

    assert await eventually(recovered)


async def test_an_exhausted_pool_is_unavailable_after_the_time_stated(dsn: str) -> None:
    opened = await create_pool(dsn, size=1, application_name="t")
    async with acquire(opened):
        with pytest.raises(StoreUnavailable, match=r"no database connection was free within 0\.3 s"):
            async with acquire(opened, timeout=SHORT):
                pytest.fail("there was no second connection")
    async with acquire(opened, timeout=SHORT) as conn:
        assert await conn.fetchval("SELECT 1") == 1
    await close_pool(opened)


async def test_acquires_that_time_out_or_are_cancelled_leak_no_connection(dsn: str, db: Connection) -> None:
    opened = await create_pool(dsn, size=3, application_name="leaky?")
    rng = random.Random(93)

    async def use() -> None:
        wait = timedelta(seconds=rng.choice((0.0, 0.0002, 0.001, 0.01)))
        try:
            async with acquire(opened, timeout=wait) as conn:
                await conn.fetchval("SELECT 1")
        except StoreUnavailable:
            pass

    for _ in range(100):
        tasks = [asyncio.create_task(use()) for _ in range(100)]
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 30):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async with acquire(opened) as one, acquire(opened) as two, acquire(opened) as three:
        assert [await conn.fetchval("SELECT 1") for conn in (one, two, three)] == [1, 1, 1]
    await close_pool(opened)

    async def nobody() -> bool:
        return bool(await db.fetchval(LEAKY) == 0)

    assert await eventually(nobody)


async def test_a_cancelled_transaction_leaves_neither_its_locks_nor_its_rows(
    dsn: str, db: Connection
) -> None:
    opened = await create_pool(dsn, size=5, application_name="cancelled?")
    rng = random.Random(12099)
    await db.execute(
        "INSERT INTO tenant SELECT gen_random_uuid(), 'locked', now() FROM generate_series(1, 20)"
    )

    async def lock_and_wait() -> None:
        async with transaction(opened) as conn:
            await conn.fetch("SELECT id FROM tenant WHERE name = 'locked' FOR UPDATE SKIP LOCKED")
            await conn.execute(ADD_TENANT, uuid4(), "never")
            await conn.execute("SELECT pg_sleep(60)")

    for _ in range(60):
        tasks = [asyncio.create_task(lock_and_wait()) for _ in range(5)]
        await asyncio.sleep(rng.random() * 0.02)  # anywhere between the first await and the last
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended

    async def nothing_is_held() -> bool:
        return bool(await db.fetchval(HELD) == 0)

    assert await eventually(nothing_is_held)
    assert len(await db.fetch("SELECT 1 FROM tenant WHERE name = 'locked' FOR UPDATE NOWAIT")) == 20
    assert await db.fetchval("SELECT count(*) FROM tenant WHERE name = 'never'") == 0
    async with acquire(opened) as conn:
        assert await conn.fetchval("SELECT 1") == 1
    await close_pool(opened)


async def test_a_cancelled_task_ends_as_cancelled_also_when_its_connection_died(
    pool: Pool, db: Connection
) -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    killed = asyncio.Event()

    async def work() -> None:
        async with transaction(pool) as conn:
            started.set_result(await conn.fetchval("SELECT pg_backend_pid()"))
            await killed.wait()

    task = asyncio.create_task(work())
    await db.execute("SELECT pg_terminate_backend($1, 5000)", await started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_transaction_somebody_forgot_is_ended_when_the_connection_comes_back(dsn: str) -> None:
    opened = await create_pool(dsn, size=1, application_name="t")
    loop, reports = asyncio.get_running_loop(), []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: reports.append(context["message"]))
    async with acquire(opened) as conn:
        await conn.execute("BEGIN")
        await conn.execute(ADD_TENANT, uuid4(), "forgotten")
    loop.set_exception_handler(before)
    async with acquire(opened) as conn:
        assert not conn.is_in_transaction()
        assert await conn.fetchval(COUNT_TENANTS) == 0
    assert len(reports) == 1  # a fault of ours, so it is told
    await close_pool(opened)


async def test_a_server_gone_silent_ends_the_call_and_the_pool_recovers(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "RELEASE_TIMEOUT", SHORT)
    monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT", SHORT)
    async with _wire(dsn) as wire:
        opened = await create_pool(wire.dsn, size=1, application_name="t", command_timeout=SHORT)
        async with acquire(opened) as conn:
            await conn.fetchval("SELECT 1")
        wire.passes.clear()
        with pytest.raises(StoreUnavailable):
            async with transaction(opened) as conn:
                await conn.fetchval("SELECT 1")
        wire.passes.set()

        async def answers() -> bool:
            try:
                async with acquire(opened, timeout=SHORT) as conn:
                    return bool(await conn.fetchval("SELECT 1") == 1)
            except StoreUnavailable:
                return False

        assert await eventually(answers)
        await close_pool(opened)


async def test_closing_a_pool_does_not_wait_for_ever_for_a_connection_in_use(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT", SHORT)
    opened = await create_pool(dsn, size=1, application_name="t")
    async with acquire(opened) as conn:
        await close_pool(opened)
        with pytest.raises(StoreUnavailable), translated():
            await conn.fetchval("SELECT 1")


async def test_a_database_that_cannot_be_reached_is_unavailable_and_its_password_stays_unsaid() -> None:
    address = f"postgresql://carillon:{SECRET}@127.0.0.1:1/carillon"
    for attempt in (
        create_pool(address, size=1, application_name="t"),
        connect(address, application_name="t"),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await attempt
        assert SECRET not in _everything(caught.value)


async def test_a_lazy_pool_opens_without_a_database_and_fails_when_used() -> None:
    opened = await create_pool("postgresql://x@127.0.0.1:1/x", size=2, application_name="t", min_size=0)
    with pytest.raises(StoreUnavailable):
        async with acquire(opened):
            pytest.fail("there is no server")
    await close_pool(opened)


async def test_a_missing_database_is_unavailable_and_named(dsn: str) -> None:
    elsewhere = urlunsplit(urlsplit(dsn)._replace(path="/nowhere"))
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await connect(elsewhere, application_name="t")


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://u:{SECRET}@127.0.0.1:port/x",
        f"mysql://u:{SECRET}@127.0.0.1/x",
        f"postgresql://u:{SECRET}@[::1/x",
    ],
)
async def test_a_url_that_cannot_be_read_is_a_wrong_setting_and_its_password_stays_unsaid(
    address: str,
) -> None:
    with pytest.raises(ConfigError, match="database URL") as caught:
        await create_pool(address, size=1, application_name="t")
    assert SECRET not in _everything(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.TooManyConnectionsError("sorry, too many clients already"),
        asyncpg.CannotConnectNowError("the database system is in recovery mode"),
        asyncpg.AdminShutdownError("terminating connection due to administrator command"),
        asyncpg.SerializationError("could not serialize access"),
        asyncpg.DiskFullError("could not extend file"),
        asyncpg.IdleInTransactionSessionTimeoutError(
            "terminating connection due to idle-in-transaction timeout"
        ),
        asyncpg.InvalidPasswordError("password authentication failed"),
        asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.InterfaceError("pool is closing"),
        asyncpg.InvalidCachedStatementError("cached statement plan is invalid"),
        asyncpg.OutdatedSchemaCacheError("cached schema is outdated"),
        ConnectionResetError("reset by peer"),
        TimeoutError(),
    ],
)
def test_what_says_not_now_or_again_is_unavailable(error: Exception) -> None:
    with pytest.raises(StoreUnavailable), translated():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.PostgresSyntaxError("syntax error"),
        asyncpg.UndefinedColumnError("column does not exist"),
        asyncpg.InsufficientPrivilegeError("permission denied"),
        asyncpg.FeatureNotSupportedError("not supported"),
        asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
        ValueError("not the driver's"),
        asyncio.CancelledError(),
    ],
)
def test_what_is_our_own_fault_or_not_the_drivers_passes_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, translated():
        raise error
    assert caught.value is error


async def test_a_lock_that_cannot_be_had_in_time_is_unavailable(pool: Pool, dsn: str) -> None:
    hasty = await connect(dsn, application_name="t", settings={"lock_timeout": "50ms"})
    async with transaction(pool) as conn:
        await conn.execute("LOCK TABLE tenant")
        with pytest.raises(StoreUnavailable, match="55P03"), translated():
            await hasty.fetchval(COUNT_TENANTS)
    await close(hasty)


async def test_a_statement_that_takes_too_long_is_unavailable(dsn: str) -> None:
    hasty = await connect(dsn, application_name="t", settings={"statement_timeout": "50ms"})
    with pytest.raises(StoreUnavailable, match="57014"), translated():
        await hasty.execute("SELECT pg_sleep(60)")
    await close(hasty)


async def test_a_read_only_server_is_unavailable(dsn: str) -> None:
    standby = await connect(dsn, application_name="t", settings={"default_transaction_read_only": "on"})
    with pytest.raises(StoreUnavailable, match="25006"), translated():
        await standby.execute(ADD_TENANT, uuid4(), "x")
    await close(standby)


async def test_of_two_in_a_deadlock_one_is_unavailable_and_the_other_commits(pool: Pool) -> None:
    first, second = uuid4(), uuid4()
    async with acquire(pool) as conn:
        await conn.executemany(ADD_TENANT, [(first, "a"), (second, "b")])
    barrier = asyncio.Barrier(2)

    async def rename(one: UUID, other: UUID) -> None:
        async with transaction(pool) as conn:
            await conn.execute("SET LOCAL lock_timeout = '20s'")
            await conn.execute("UPDATE tenant SET name = 'x' WHERE id = $1", one)
            await barrier.wait()
            await conn.execute("UPDATE tenant SET name = 'x' WHERE id = $1", other)

    ended = await asyncio.gather(rename(first, second), rename(second, first), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ended) == ["NoneType", "StoreUnavailable"]


async def _add_twice(conn: Connection) -> None:
    one = uuid4()
    for _ in range(2):
        await conn.execute(ADD_TENANT, one, SECRET)


async def _add_null(conn: Connection) -> None:
    await conn.execute(ADD_TENANT, uuid4(), None)


async def _add_too_long(conn: Connection) -> None:
    await conn.execute(ADD_TENANT, uuid4(), SECRET * 100)


async def _add_nul(conn: Connection) -> None:
    await conn.execute(ADD_TENANT, uuid4(), SECRET + "\x00")


async def _add_surrogate(conn: Connection) -> None:
    await conn.execute(ADD_TENANT, uuid4(), SECRET + "\ud800")


async def _add_wrong_type(conn: Connection) -> None:
    await conn.execute(ADD_TENANT, SECRET, "x")


async def _overflow(conn: Connection) -> None:
    await conn.fetchval("SELECT $1::int", 2**40)


async def _bad_json(conn: Connection) -> None:
    await conn.fetchval("SELECT $1::jsonb", f'{{"{SECRET}": "\\u0000"}}')


async def _orphan_key(conn: Connection) -> None:
    await conn.execute(
        "INSERT INTO api_key (id, tenant_id, name, secret_sha256, scopes, created_at)"
        " VALUES ($1, $2, 'x', $3, '{}', now())",
        SECRET[:12],
        uuid4(),
        bytes(32),
    )


async def _too_long_for_its_index(conn: Connection) -> None:
    await conn.execute("CREATE TABLE wide (text text); CREATE INDEX ON wide (text)")
    noise = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000))
    await conn.execute("INSERT INTO wide VALUES ($1)", SECRET + noise)


async def _without_month(conn: Connection) -> None:
    await conn.execute(
        """
        INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, outcome, maybe_delivered, finished_at,
                                 worker, lease_token)
        VALUES ($1, $2, 1, $1, $3, true, now(), 'w', 't')
        """,
        uuid4(),
        datetime(1999, 1, 1, tzinfo=UTC),
        SECRET,
    )


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (_add_twice, Conflict),
        (_without_month, PartitionMissing),
        (_add_null, RowRefused),
        (_add_too_long, RowRefused),
        (_add_nul, RowRefused),
        (_add_surrogate, RowRefused),
        (_add_wrong_type, RowRefused),
        (_overflow, RowRefused),
        (_bad_json, RowRefused),
        (_orphan_key, RowRefused),
        (_too_long_for_its_index, RowRefused),
    ],
)
async def test_what_the_database_refuses_has_its_class_and_shows_no_value(
    each_server_pool: Pool, act: Callable[[Connection], Awaitable[None]], expected: type[Exception]
) -> None:
    with pytest.raises(Exception) as caught:
        async with transaction(each_server_pool) as conn:
            await act(conn)
    assert type(caught.value) is expected
    assert SECRET[:12] not in _everything(caught.value)


async def test_a_refusal_names_the_constraint(pool: Pool) -> None:
    with pytest.raises(RowRefused, match="partition_request_month_check"):
        async with transaction(pool) as conn:
            await conn.execute(ADD_REQUEST, datetime(2026, 1, 2, tzinfo=UTC).date())


def _everything(error: BaseException) -> str:
    """All that a log with a traceback would show."""
    return "".join(traceback.format_exception(error))


class _Wire:
    """A connection to the server that can go silent: no bytes pass, and nothing is closed, as when packets are lost."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.passes = asyncio.Event()
        self.passes.set()
        self.tasks: set[asyncio.Task[None]] = set()


@asynccontextmanager
async def _wire(dsn: str) -> AsyncIterator[_Wire]:
    address = urlsplit(dsn)
    wire = _Wire(dsn)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await wire.passes.wait()
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address.hostname, address.port)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(pump(source, sink))
            wire.tasks.add(task)
            task.add_done_callback(wire.tasks.discard)

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wire.dsn = urlunsplit(address._replace(netloc=f"{address.username}@127.0.0.1:{port}"))
    try:
        yield wire
    finally:
        server.close()
        await server.wait_closed()
        wire.passes.set()
        left = list(wire.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
