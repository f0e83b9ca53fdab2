"""What load runs ask of the database: its clock, counters before and after, and what became of the runs.

Questions asked while something is measured carry `carillon load` in their text, and are left out of the count of
statements.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import asyncpg

from app.store import claims
from app.store.claims import LEFT_END, Cursor, Grant
from app.store.pool import Connection, translated

CLOCK = "SELECT /* carillon load */ clock_timestamp()"


async def clock(conn: Connection) -> datetime:
    """The database's clock at this moment, not at its transaction's begin."""
    with translated():
        found: datetime = await conn.fetchval(CLOCK)
    return found


WAL_BYTES = "SELECT /* carillon load */ (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"


async def wal_bytes(conn: Connection) -> int:
    """How many bytes of write-ahead log the server has made in its life."""
    with translated():
        found: int = await conn.fetchval(WAL_BYTES)
    return found


# Nothing is known of this view where the extension is not loaded, so no test can prepare it: hence the form of the
# name. What the harness itself asks is left out.
_STATEMENT_USE = """SELECT /* carillon load */ s.queryid, min(s.query) AS query, sum(s.calls)::bigint AS calls,
       sum(s.total_exec_time) AS total_ms
  FROM pg_stat_statements AS s
  JOIN pg_database AS d ON d.oid = s.dbid
 WHERE d.datname = current_database()
   AND s.query NOT LIKE '%carillon load%'
 GROUP BY s.queryid"""


@dataclass(frozen=True, slots=True)
class StatementUse:
    """How often a statement was executed, and for how long altogether, on the server."""

    query: str
    calls: int
    total_ms: float


async def statement_use(conn: Connection) -> dict[int, StatementUse] | None:
    """What the sessions of this database have executed so far, by query id; None where nobody counts."""
    try:
        with translated():
            rows = await conn.fetch(_STATEMENT_USE)
    except asyncpg.PostgresError:  # no such view, or its library is not loaded
        return None
    return {row["queryid"]: StatementUse(row["query"], row["calls"], row["total_ms"]) for row in rows}


# Not a statement that can be prepared, hence the form of the name.
_COUNT_STATEMENTS = "CREATE EXTENSION IF NOT EXISTS pg_stat_statements"


async def count_statements(conn: Connection) -> None:
    """Make the view that `statement_calls` reads. Only for a server of our own, started with its library."""
    with translated():
        await conn.execute(_COUNT_STATEMENTS)


TRANSACTIONS = """SELECT /* carillon load */ xact_commit + xact_rollback
  FROM pg_stat_database
 WHERE datname = current_database()"""


async def transactions(conn: Connection) -> int:
    """Transactions of this database so far, as its sessions have reported them (within a second)."""
    with translated():
        found: int = await conn.fetchval(TRANSACTIONS)
    return found


SUCCEEDED_SO_FAR = "SELECT /* carillon load */ count(*) FROM job_run WHERE status = 'succeeded'"


async def succeeded_so_far(conn: Connection) -> int:
    """How many runs have succeeded; reads all of them."""
    with translated():
        found: int = await conn.fetchval(SUCCEEDED_SO_FAR)
    return found


IS_SEEDED = "SELECT /* carillon load */ EXISTS (SELECT 1 FROM tenant)"


async def is_seeded(conn: Connection) -> bool:
    """Whether an earlier round has left its tenants."""
    with translated():
        found: bool = await conn.fetchval(IS_SEEDED)
    return found


IS_UNPLANNED = """SELECT /* carillon load */ EXISTS (
    SELECT 1 FROM schedule WHERE status = 'active' AND next_fire_at <= $1
)"""


async def is_unplanned(conn: Connection, until: datetime) -> bool:
    """Whether some schedule has an occurrence up to `until` that is not planned yet."""
    with translated():
        found: bool = await conn.fetchval(IS_UNPLANNED, until)
    return found


IS_OPEN = """SELECT /* carillon load */ EXISTS (
    SELECT 1 FROM job_run WHERE status IN ('pending', 'retrying') AND scheduled_for <= $1
)"""


async def is_open(conn: Connection, until: datetime) -> bool:
    """Whether some run of an instant up to `until` has not ended; also one that waits for its next attempt."""
    with translated():
        found: bool = await conn.fetchval(IS_OPEN, until)
    return found


PLANNED = """SELECT count(*) AS runs, count(DISTINCT created_at) AS batches,
       min(created_at) AS first_at, max(created_at) AS last_at
  FROM job_run
 WHERE scheduled_for BETWEEN $1 AND $2"""


@dataclass(frozen=True, slots=True)
class PlannedRuns:
    """Runs of a stretch of instants, and the begins of the first and last transactions that wrote them."""

    runs: int
    batches: int
    first_at: datetime | None
    last_at: datetime | None


async def planned(conn: Connection, since: datetime, until: datetime) -> PlannedRuns:
    """What was planned for the instants from `since` to `until`, both included."""
    with translated():
        row = await conn.fetchrow(PLANNED, since, until)
    assert row is not None
    return PlannedRuns(row["runs"], row["batches"], row["first_at"], row["last_at"])


ENDED = """SELECT status, count(*) AS runs, max(finished_at) AS last_at
  FROM job_run
 WHERE scheduled_for BETWEEN $1 AND $2
 GROUP BY status"""


@dataclass(frozen=True, slots=True)
class EndedRuns:
    """How many runs there are by status, and when the last success was written."""

    by_status: dict[str, int]
    last_success_at: datetime | None

    @property
    def succeeded(self) -> int:
        return self.by_status.get("succeeded", 0)


async def ended(conn: Connection, since: datetime, until: datetime) -> EndedRuns:
    """What became of the runs of the instants from `since` to `until`, both included."""
    with translated():
        rows = await conn.fetch(ENDED, since, until)
    last = next((row["last_at"] for row in rows if row["status"] == "succeeded"), None)
    return EndedRuns({row["status"]: row["runs"] for row in rows}, last)


SUCCEEDED_IDS = """SELECT idempotency_key
  FROM job_run
 WHERE scheduled_for BETWEEN $1 AND $2
   AND status = 'succeeded'"""


async def succeeded_ids(conn: Connection, since: datetime, until: datetime) -> list[UUID]:
    """The delivery ids that the database has on record as succeeded."""
    with translated():
        rows = await conn.fetch(SUCCEEDED_IDS, since, until)
    return [row[0] for row in rows]


ATTEMPTS = """SELECT count(*)
  FROM run_attempt
 WHERE scheduled_for BETWEEN $1 AND $2
   AND outcome = 'delivered'"""


async def attempts(conn: Connection, since: datetime, until: datetime) -> int:
    """How many attempts of the runs of these instants have their evidence as delivered."""
    with translated():
        found: int = await conn.fetchval(ATTEMPTS, since, until)
    return found


PLANNED_SERIES = """SELECT floor(extract(epoch FROM created_at - $3) * 1000 / $4)::int AS step, count(*) AS runs
  FROM job_run
 WHERE scheduled_for BETWEEN $1 AND $2
 GROUP BY 1"""

RECORDED_SERIES = """SELECT floor(extract(epoch FROM finished_at - $3) * 1000 / $4)::int AS step, count(*) AS runs
  FROM job_run
 WHERE scheduled_for BETWEEN $1 AND $2
   AND status = 'succeeded'
 GROUP BY 1"""


async def planned_series(
    conn: Connection, since: datetime, until: datetime, *, zero: datetime, step_ms: int
) -> dict[int, int]:
    """Runs planned per step of `step_ms` milliseconds; step 0 begins at `zero`."""
    return await _series(conn, PLANNED_SERIES, since, until, zero, step_ms)


async def recorded_series(
    conn: Connection, since: datetime, until: datetime, *, zero: datetime, step_ms: int
) -> dict[int, int]:
    """Successes written per step of `step_ms` milliseconds; step 0 begins at `zero`."""
    return await _series(conn, RECORDED_SERIES, since, until, zero, step_ms)


async def _series(
    conn: Connection, statement: str, since: datetime, until: datetime, zero: datetime, step_ms: int
) -> dict[int, int]:
    with translated():
        rows = await conn.fetch(statement, since, until, zero, step_ms)
    return {row["step"]: row["runs"] for row in rows}


STATED_SETTINGS: Final = (
    *("fsync", "synchronous_commit", "full_page_writes", "wal_compression", "wal_level", "data_checksums"),
    *("shared_buffers", "max_wal_size", "checkpoint_timeout", "checkpoint_completion_target", "wal_buffers"),
    *("max_connections", "autovacuum", "jit", "shared_preload_libraries", "track_io_timing", "huge_pages"),
    *("commit_delay", "wal_sync_method", "random_page_cost", "effective_io_concurrency"),
)

SERVER_SETTINGS = (
    "SELECT name, current_setting(name) AS value FROM pg_settings WHERE name = ANY($1) ORDER BY name"
)
SERVER_VERSION = "SELECT current_setting('server_version')"


async def server_settings(conn: Connection, names: Sequence[str] = STATED_SETTINGS) -> dict[str, str]:
    """The server's settings that a figure depends on, as the server shows them."""
    with translated():
        rows = await conn.fetch(SERVER_SETTINGS, list(names))
    return {row["name"]: row["value"] for row in rows}


async def server_version(conn: Connection) -> str:
    """Such as `18.6`."""
    with translated():
        found: str = await conn.fetchval(SERVER_VERSION)
    return found


# Takes a snapshot and no lock on any table of ours.
TAKE_SNAPSHOT = "SELECT pg_current_snapshot()"


@asynccontextmanager
async def held_snapshot(conn: Connection) -> AsyncIterator[None]:
    """Hold a REPEATABLE READ snapshot for the length of the block: what dies meanwhile cannot be cleaned up."""
    with translated():
        current = conn.transaction(isolation="repeatable_read", readonly=True)
        await current.start()
    try:
        with translated():
            await conn.fetchval(TAKE_SNAPSHOT)
        yield
    finally:
        with translated():
            await current.rollback()


IS_SNAPSHOT_HELD = """SELECT backend_xmin IS NOT NULL AND state = 'active'
   AND backend_xmin::text::bigint = pg_snapshot_xmin(pg_current_snapshot())::text::bigint % 4294967296
  FROM pg_stat_activity
 WHERE pid = pg_backend_pid()"""


async def is_snapshot_held(conn: Connection) -> bool:
    """Whether the session that asks still holds back the horizon with the snapshot of its transaction."""
    with translated():
        found: bool = await conn.fetchval(IS_SNAPSHOT_HELD)
    return found


async def time_claim(
    conn: Connection, grant: Grant, *, limit: int, ahead: timedelta, behind: Cursor = LEFT_END
) -> tuple[float, int]:
    """How many seconds one claim takes, and how many runs it got; then it is undone.

    It also takes runs that are due only within `ahead`, which no executor does: rows that wait for it alone. `conn` is
    one with PLAN_GUARDS, as a claimer's.
    """
    with translated():
        current = conn.transaction()
        await current.start()
        try:
            begun = time.perf_counter()
            runs = await claims.claim_due(conn, grant, limit=limit, behind=behind, overdue_by=-ahead)
            return time.perf_counter() - begun, len(runs)
        finally:
            await current.rollback()
