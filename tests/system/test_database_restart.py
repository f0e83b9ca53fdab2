"""The database goes away in the middle of a burst and comes back: replicas wait for it, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from app.local.ledger import LedgerLine, read_ledger
from app.local.postgres import EmbeddedPostgres
from app.local.processes import spawn, stop, wait_for_line
from app.store.migrations import apply_all
from app.store.pool import Connection, close, connect
from tests.eventually import eventually
from tests.ports import quiet_port
from tests.servers import SETTINGS, run
from tests.system import evidence
from tests.system.replicas import Fleet, Replica, plain_environment, probe
from tests.system.seeding import seed_one_offs, soon

RUNS = 2_000
FEWER_RUNS = 400
SLOTS = 30
NOTICED_WITHIN = timedelta(seconds=60)


class Restartable:
    """A server of the test's own that can go away and come back at the same address with the same data."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._running: EmbeddedPostgres | None = None
        self._port = quiet_port()
        self.start()

    @property
    def dsn(self) -> str:
        assert self._running is not None
        return self._running.dsn

    def start(self) -> None:
        self._running = EmbeddedPostgres.start(self._data_dir, settings=SETTINGS, port=self._port)

    def stop(self) -> None:
        """Cleanly: sessions are ended, transactions rolled back."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def crash(self) -> None:
        """At once, without a word to anybody; the next start recovers from the log."""
        assert self._running is not None
        os.kill(self._running.pid, signal.SIGQUIT)
        self.stop()


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver in a process of its own, so that it answers while this process waits for the server."""

    url: str
    ledger_path: Path

    def ledger(self) -> list[LedgerLine]:
        return list(read_ledger(self.ledger_path))

    async def wait_for(self, count: int) -> None:
        await eventually(lambda: len(self.ledger()) >= count, within=NOTICED_WITHIN)


@pytest.fixture
def database(open_folder: Path) -> Iterator[Restartable]:
    """A migrated database on a server of the test's own."""
    server = Restartable(open_folder)
    try:
        run(apply_all(server.dsn))
        yield server
    finally:
        server.stop()


@pytest.fixture
def fleet(database: Restartable, tmp_path: Path) -> Iterator[Fleet]:
    """Replicas on that server, stopped before it."""
    started = Fleet(database.dsn, tmp_path, {"SCHEDULER_EXECUTOR_SLOTS": str(SLOTS)})
    try:
        yield started
        started.stop()
    finally:
        started.kill()


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    """It answers after 100 ms."""
    ledger = tmp_path / "ledger"
    child = spawn(
        [sys.executable, "-m", "app.local.receiver", "--ledger", ledger, "--answer", "/burst=200@100"],
        env=plain_environment(),
        log_path=tmp_path / "receiver.log",
    )
    try:
        yield Target(await wait_for_line(child, "listening ", within=NOTICED_WITHIN), ledger)
    finally:
        stop(child, grace=timedelta(seconds=10))


async def test_a_restarted_database_costs_no_run_and_no_replica(
    database: Restartable, fleet: Fleet, target: Target
) -> None:
    fleet.expect("loop.failed")
    replicas = await fleet.start("one", "two")
    dsn = database.dsn
    await _seed(dsn, target, RUNS)
    async with probe() as client:
        for go_away, share in ((database.stop, 0.1), (database.crash, 0.6)):
            await target.wait_for(int(RUNS * share))
            go_away()
            await eventually(lambda: _answer(client, replicas, "readyz", 503), within=NOTICED_WITHIN)
            assert await _answer(client, replicas, "livez", 200)
            assert all(replica.is_running for replica in replicas)
            database.start()
            await eventually(lambda: _answer(client, replicas, "readyz", 200), within=NOTICED_WITHIN)
            assert await _answer(client, replicas, "livez", 200)
    await _judge(dsn, target, RUNS)
    assert all(replica.is_running for replica in replicas)


async def test_sigterm_while_the_database_is_away_ends_the_replica_and_loses_nothing(
    database: Restartable, fleet: Fleet, target: Target
) -> None:
    fleet.expect("loop.failed", "drain.orphans")
    [leaving] = await fleet.start("leaving")
    await _seed(database.dsn, target, FEWER_RUNS)
    await target.wait_for(FEWER_RUNS // 8)
    database.stop()
    leaving.send(signal.SIGTERM)
    await leaving.saw("drain.begun")
    leaving.send(signal.SIGTERM)
    waiting = fleet.launch("waiting")
    await waiting.saw("database.awaited")
    waiting.send(signal.SIGTERM)
    assert await waiting.ended() == 0, "it had begun nothing"
    code = await leaving.ended()
    left_open = leaving.events("drain.done")[0]["unsettled"]
    assert code == (1 if left_open else 0)
    database.start()
    await fleet.start("next")
    await _judge(database.dsn, target, FEWER_RUNS)


async def _seed(dsn: str, target: Target, runs: int) -> None:
    conn = await connect(dsn, application_name="carillon tests, seed")
    try:
        at = await soon(conn, ahead=timedelta(seconds=3))
        await seed_one_offs(conn, runs, url=f"{target.url}/burst", at=at, tenants=20)
    finally:
        await close(conn)


async def _judge(dsn: str, target: Target, runs: int) -> None:
    """Wait for the end of all runs: none is missing, and what came twice has its evidence."""
    conn = await connect(dsn, application_name="carillon tests, judge")
    try:
        await evidence.all_ended(conn, runs=runs)
        assert await evidence.statuses(conn) == {"succeeded": runs}
        ledger = target.ledger()
        assert set(evidence.arrivals(ledger)) == await evidence.delivery_ids(conn)
        found = await evidence.attempts(conn)
        unsettled = evidence.with_outcome(found, "lease_lost")
        assert evidence.repeated(ledger) <= unsettled
        assert evidence.same_number_twice(ledger) == set()
        assert len(found) == runs + len(unsettled)
        assert await _leases(conn) == 0
    finally:
        await close(conn)


async def _leases(conn: Connection) -> int:
    found: int = await conn.fetchval("SELECT count(*) FROM job_run WHERE claimed_by IS NOT NULL")
    return found


async def _answer(client: httpx.AsyncClient, replicas: list[Replica], probe_name: str, status: int) -> bool:
    """Whether all replicas answer this probe with this status now."""
    answers = await asyncio.gather(*(client.get(f"{replica.url}/{probe_name}") for replica in replicas))
    return all(answer.status_code == status for answer in answers)
