"""Fixtures for everything that needs a database or a broker; see tests/servers.py and tests/brokers.py for which.

Every test has a database of its own, a copy of a migrated one with its partitions. Session fixtures are synchronous
and give addresses; connections belong to the test's own event loop.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from app.local.receiver import Receiver
from app.store.migrations import apply_all
from app.store.pool import Connection, Pool, close, close_pool, connect, create_pool
from tests import brokers as broker_kinds
from tests import frozen
from tests.brokers import BrokerPlace, Brokers, BrokerServer, OwnBroker
from tests.frozen import FrozenClock
from tests.leftovers import no_children_left, no_lost_tasks
from tests.servers import DatabaseServer, Servers, describe, main_name, names

__all__ = ["no_children_left", "no_lost_tasks"]

# No judgement by the clock: these machines are slow and shared. No example database: the tree may be read-only, and
# a failure prints what repeats it.
settings.register_profile(
    "carillon", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("carillon")

APPLICATION = "carillon tests"
POOL_SIZE = 10


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say which servers this run is about; pytest's own header is not shown under -q."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("postgresql: " + ", ".join(describe(name) for name in _names()))
        reporter.write_line("brokers: " + ", ".join(map(broker_kinds.describe, _broker_names())))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if pytest_asyncio.is_async_test(item):
            item.fixturenames.insert(0, "no_lost_tasks")  # first: it is torn down after all others


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the collections after each test then look at that test's objects only


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "each_server" in metafunc.fixturenames:
        metafunc.parametrize("each_server", _names(), indirect=True, scope="session")
    if "broker_server" in metafunc.fixturenames:
        metafunc.parametrize("broker_server", _broker_names(), indirect=True, scope="session")
    if "own_broker" in metafunc.fixturenames:
        metafunc.parametrize("own_broker", _local_broker_names(), indirect=True)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The servers of this run, each started when it is first needed."""
    running = Servers()
    yield running
    running.close()


@pytest.fixture(scope="session")
def server(servers: Servers) -> DatabaseServer:
    """The main server."""
    return servers.get(main_name())


@pytest.fixture(scope="session")
def each_server(request: pytest.FixtureRequest, servers: Servers) -> DatabaseServer:
    """Every server in turn: the test runs once on each."""
    return servers.get(request.param)


@pytest.fixture
def dsn(server: DatabaseServer) -> Iterator[str]:
    """A migrated, empty database of this test's own."""
    created = server.create_migrated(apply_all)
    yield created
    server.drop(created)


@pytest.fixture
def empty_dsn(server: DatabaseServer) -> Iterator[str]:
    """A database of this test's own without any schema."""
    created = server.create()
    yield created
    server.drop(created)


@pytest.fixture
def each_server_dsn(each_server: DatabaseServer) -> Iterator[str]:
    """Like `dsn`, on every server in turn."""
    created = each_server.create_migrated(apply_all)
    yield created
    each_server.drop(created)


@pytest.fixture
def each_server_empty_dsn(each_server: DatabaseServer) -> Iterator[str]:
    """Like `empty_dsn`, on every server in turn."""
    created = each_server.create()
    yield created
    each_server.drop(created)


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    """A pool on the test's database."""
    opened = await create_pool(dsn, size=POOL_SIZE, application_name=APPLICATION)
    yield opened
    await close_pool(opened)


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Connection]:
    """One connection to the test's database."""
    opened = await connect(dsn, application_name=APPLICATION)
    yield opened
    await close(opened)


@pytest.fixture
async def each_server_pool(each_server_dsn: str) -> AsyncIterator[Pool]:
    """Like `pool`, on every server in turn."""
    opened = await create_pool(each_server_dsn, size=POOL_SIZE, application_name=APPLICATION)
    yield opened
    await close_pool(opened)


@pytest.fixture
async def each_server_db(each_server_dsn: str) -> AsyncIterator[Connection]:
    """Like `db`, on every server in turn."""
    opened = await connect(each_server_dsn, application_name=APPLICATION)
    yield opened
    await close(opened)


@pytest.fixture
async def frozen_clock(dsn: str) -> AsyncIterator[FrozenClock]:
    """A clock of the test's database that stands still; its `pool` sees it, `pool` and `db` do not."""
    mover = await connect(dsn, application_name="carillon tests, clock")
    await mover.execute(frozen.CREATE)
    opened = await create_pool(dsn, size=POOL_SIZE, application_name=APPLICATION, settings=frozen.SESSION)
    yield FrozenClock(pool=opened, mover=mover)
    await close_pool(opened)
    await close(mover)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A target that answers 200 and writes down what arrives."""
    started = await Receiver.start()
    yield started
    await started.stop()


@pytest.fixture(scope="session")
def brokers() -> Iterator[Brokers]:
    """The brokers of this run, each started when it is first needed."""
    running = Brokers()
    yield running
    running.close()


@pytest.fixture(scope="session")
def broker_server(request: pytest.FixtureRequest, brokers: Brokers) -> BrokerServer:
    """Every broker in turn: the test runs once on each."""
    return brokers.get(request.param)


@pytest.fixture
def broker(broker_server: BrokerServer) -> BrokerPlace:
    """A topic and a group of this test's own, not made yet, on every broker in turn."""
    return broker_kinds.place_on(broker_server)


@pytest.fixture
def own_broker(request: pytest.FixtureRequest) -> Iterator[OwnBroker]:
    """A broker of this test's own that can be halted and resumed, of every kind in turn."""
    with broker_kinds.start_local(request.param) as local:
        yield OwnBroker(request.param, local)


def _broker_names() -> list[str]:
    try:
        return broker_kinds.names()
    except LookupError as error:
        raise pytest.UsageError(str(error)) from error


def _local_broker_names() -> list[str]:
    found = broker_kinds.local_names()
    if not found:
        raise pytest.UsageError(
            "tests that take a broker away need one of their own: install the extra `embedded`"
        )
    return found


def _names() -> list[str]:
    try:
        return names()
    except LookupError as error:
        raise pytest.UsageError(str(error)) from error
