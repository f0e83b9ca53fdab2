"""The months: made without stalling anybody, known to the planner, and UTC whatever the session says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.ids import ScheduleId, TenantId
from app.errors import PartitionMissing, StoreError, StoreUnavailable
from app.store import partitions
from app.store.partitions import (
    PARENTS,
    Month,
    Span,
    attached_range,
    current_month,
    ensure_ahead,
    ensure_month,
    horizon,
    sole_maintainer,
)
from app.store.pool import Connection, Pool, acquire, close, connect, translated
from tests.factories_history import INSERT_RUNS, add_runs
from tests.frozen import FrozenClock

FAR = Month(2040, 2)
CLAIM_LIKE = (
    "UPDATE job_run SET claimed_by = 'r/1/1', claim_expires_at = now() + interval '1 min', attempt = 1"
)
INDEXES = """
SELECT i.inhparent::regclass::text AS parent
FROM pg_index x JOIN pg_inherits i ON i.inhrelid = x.indexrelid
WHERE x.indrelid = $1::text::regclass ORDER BY 1
"""
PARENT_INDEXES = (
    "SELECT indexrelid::regclass::text AS parent FROM pg_index WHERE indrelid = $1::text::regclass ORDER BY 1"
)


async def test_the_current_month_and_those_ahead_are_made_once(each_server_db: Connection) -> None:
    month = await current_month(each_server_db)
    made = await ensure_ahead(each_server_db, months=5)
    assert made == [
        partitions.partition_name(parent, month.plus(offset)) for offset in (4, 5) for parent in PARENTS
    ]
    assert await ensure_ahead(each_server_db, months=5) == []
    assert await attached_range(each_server_db) == [Span(month.start, month.plus(5).end)]


async def test_twenty_makers_at_once_make_each_table_once(
    each_server_dsn: str, each_server_pool: Pool
) -> None:
    async def make() -> list[str]:
        async with acquire(each_server_pool, timeout=timedelta(seconds=60)) as conn:
            return await ensure_month(conn, FAR)

    made = await asyncio.gather(*(make() for _ in range(20)))
    assert sorted(name for names in made for name in names) == ["job_run_2040_02", "run_attempt_2040_02"]


async def test_a_month_has_every_index_of_its_parent_and_its_own_storage_rules(
    each_server_db: Connection,
) -> None:
    await ensure_month(each_server_db, FAR)
    for parent in PARENTS:
        name = partitions.partition_name(parent, FAR)
        mine = [row["parent"] for row in await each_server_db.fetch(INDEXES, name)]
        assert mine == [row["parent"] for row in await each_server_db.fetch(PARENT_INDEXES, parent)]
    options = "SELECT reloptions FROM pg_class WHERE relname = $1"
    runs = await each_server_db.fetchval(options, "job_run_2040_02")
    attempts = await each_server_db.fetchval(options, "run_attempt_2040_02")
    assert "fillfactor=50" in runs
    assert not [option for option in attempts if option.startswith("fillfactor")]
    for chosen in (runs, attempts):
        assert "autovacuum_vacuum_scale_factor=0.01" in chosen
        assert "autovacuum_vacuum_cost_delay=0" in chosen


async def test_the_unique_guard_holds_in_a_month_made_later(db: Connection) -> None:
    tenant, schedule = TenantId(uuid4()), ScheduleId(uuid4())
    at = FAR.start
    await add_runs(db, tenant, [(schedule, at)])
    other_id = uuid4()
    with pytest.raises(StoreError), translated():
        await db.execute(INSERT_RUNS, tenant, "pending", [other_id], [at], [schedule])


@pytest.mark.parametrize("zone", ["Pacific/Chatham", "America/St_Johns", "UTC"])
async def test_bounds_are_utc_months_whatever_the_sessions_zone_and_date_style(
    each_server_dsn: str, zone: str
) -> None:
    odd = {"TimeZone": zone, "DateStyle": "SQL, DMY"}
    conn = await connect(each_server_dsn, application_name="t", settings=odd)
    await ensure_month(conn, FAR)
    await close(conn)
    plain = await connect(each_server_dsn, application_name="t")
    assert Span(FAR.start, FAR.end) in await attached_range(plain)
    tenant, schedule = TenantId(uuid4()), ScheduleId(uuid4())
    last = FAR.end - timedelta(milliseconds=1)
    await plain.execute(INSERT_RUNS, tenant, "pending", [uuid4(), uuid4()], [FAR.start, last], [schedule] * 2)
    assert await plain.fetchval("SELECT count(*) FROM job_run_2040_02") == 2
    for outside in (FAR.start - timedelta(milliseconds=1), FAR.end):
        with pytest.raises(PartitionMissing), translated():
            await plain.execute(INSERT_RUNS, tenant, "pending", [uuid4()], [outside], [schedule])
    await close(plain)


async def test_a_month_is_attached_while_a_history_read_is_open_and_claims_go_on(
    each_server_dsn: str, each_server_pool: Pool
) -> None:
    async with acquire(each_server_pool) as conn:
        month = await current_month(conn)
        tenant, schedule = TenantId(uuid4()), ScheduleId(uuid4())
        seconds = [month.start + timedelta(seconds=second) for second in range(50)]
        await add_runs(conn, tenant, [(schedule, at) for at in seconds], status="pending")
    async with _open_read(each_server_dsn), _open_claim(each_server_dsn):
        # Every lock below is asked for with a time-out; behind an ACCESS EXCLUSIVE request none could be had.
        maker = await connect(each_server_dsn, application_name="t", settings={"lock_timeout": "2s"})
        assert await ensure_month(maker, FAR) == ["job_run_2040_02", "run_attempt_2040_02"]
        await maker.execute(CLAIM_LIKE + " WHERE claimed_by IS NULL AND scheduled_for > $1", seconds[9])
        await close(maker)


async def test_claims_are_not_held_up_by_a_maker_that_waits(each_server_dsn: str) -> None:
    """A vacuum of the parent holds the very lock that ATTACH wants: the maker gives up, nobody queues behind it."""
    holder = await connect(each_server_dsn, application_name="t")
    hasty = await connect(each_server_dsn, application_name="t", settings={"lock_timeout": "100ms"})
    worker = await connect(each_server_dsn, application_name="t", settings={"lock_timeout": "2s"})
    async with holder.transaction():
        await holder.execute("LOCK TABLE job_run IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailable):
            await ensure_month(hasty, FAR)
        await worker.execute(CLAIM_LIKE)
    assert await worker.fetchval("SELECT to_regclass('job_run_2040_02')") is None
    assert await ensure_month(hasty, FAR) != []
    for conn in (holder, hasty, worker):
        await close(conn)


async def test_a_maker_that_fails_halfway_leaves_neither_table(db: Connection) -> None:
    await db.execute("CREATE TABLE run_attempt_2040_02 (unrelated int)")
    with pytest.raises(StoreError, match="2040-02 of run_attempt"):
        await ensure_month(db, FAR)
    assert await db.fetchval("SELECT to_regclass('job_run_2040_02')") is None


async def test_months_follow_the_databases_clock_and_stand_in_the_parents_schema(
    frozen_clock: FrozenClock,
) -> None:
    await frozen_clock.set(datetime(2039, 12, 31, 23, 59, 59, tzinfo=UTC))
    async with acquire(frozen_clock.pool) as conn:
        assert await current_month(conn) == Month(2039, 12)
        made = await ensure_ahead(conn, months=1)
        schema = await conn.fetchval(
            "SELECT string_agg(DISTINCT relnamespace::regnamespace::text, ',') FROM pg_class WHERE relname = ANY($1)",
            made,
        )
    assert made == ["job_run_2039_12", "run_attempt_2039_12", "job_run_2040_01", "run_attempt_2040_01"]
    assert schema == "public"


async def test_the_attached_range_shows_gaps_and_the_horizon_ends_at_the_first(db: Connection) -> None:
    month = await current_month(db)
    await ensure_month(db, FAR)
    await ensure_month(db, FAR.plus(1))
    near = Span(month.start, month.plus(3).end)
    assert await attached_range(db) == [near, Span(FAR.start, FAR.plus(1).end)]
    assert await horizon(db, now=month.start) == near.end
    assert await horizon(db, now=near.end) is None
    assert await horizon(db, now=FAR.end) == FAR.plus(1).end


async def test_a_request_counts_once_and_is_forgotten_when_withdrawn(db: Connection) -> None:
    for month in (FAR, Month(2039, 1), FAR):
        await partitions.request(db, month)
    assert await partitions.requested(db) == [Month(2039, 1), FAR]
    assert await db.fetchval("SELECT max(month) FROM partition_request") == date(2040, 2, 1)
    await partitions.withdraw(db, [FAR])
    assert await partitions.requested(db) == [Month(2039, 1)]


async def test_only_one_session_maintains_at_a_time_and_the_right_ends_with_its_block(pool: Pool) -> None:
    async with sole_maintainer(pool) as first:
        assert first is not None
        assert not first.is_in_transaction()
        async with sole_maintainer(pool) as second:
            assert second is None
    async with sole_maintainer(pool) as third:
        assert third is not None


async def test_a_maintainer_that_fails_gives_its_right_back(pool: Pool) -> None:
    async def fail() -> None:
        async with sole_maintainer(pool):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with sole_maintainer(pool) as conn:
        assert conn is not None


@given(st.integers(1980, 2900), st.integers(1, 12), st.integers(-60, 60))
def test_months_are_half_open_and_follow_each_other(year: int, number: int, by: int) -> None:
    month = Month(year, number)
    assert month.end == month.plus(1).start
    assert month.plus(by).plus(-by) == month
    assert Month.of(month.start) == month == Month.of(month.end - timedelta(microseconds=1))
    assert (month.plus(by) < month) is (by < 0)


def test_the_month_of_an_instant_is_its_utc_month() -> None:
    east = timezone(timedelta(hours=14))
    assert Month.of(datetime(2026, 1, 1, 13, 59, tzinfo=east)) == Month(2025, 12)
    with pytest.raises(ValueError, match="zone"):
        Month.of(datetime(2026, 1, 1))  # noqa: DTZ001  # that is the point
    for year, month in ((1969, 12), (9999, 1), (2026, 0), (2026, 13)):
        with pytest.raises(ValueError, match="no month"):
            Month(year, month)


@asynccontextmanager
async def _open_read(dsn: str) -> AsyncIterator[None]:
    """A transaction that has read the whole history and stays open, as behind a slow client."""
    reader = await connect(dsn, application_name="reader")
    async with reader.transaction(isolation="repeatable_read", readonly=True):
        await reader.fetch("SELECT id FROM job_run")
        yield
    await close(reader)


@asynccontextmanager
async def _open_claim(dsn: str) -> AsyncIterator[None]:
    """A claim that has written its rows and has not committed yet."""
    worker = await connect(dsn, application_name="worker")
    async with worker.transaction():
        await worker.execute(
            CLAIM_LIKE + " WHERE id IN (SELECT id FROM job_run ORDER BY scheduled_for LIMIT 10)"
        )
        yield
    await close(worker)
