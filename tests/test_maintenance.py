"""Maintenance: months made and taken out, figures read. Nothing that is open is ever taken out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from app import maintenance, metrics
from app.domain.ids import ScheduleId, TenantId
from app.errors import PartitionMissing, StoreUnavailable
from app.maintenance import BLOCKED_PAUSE, apply_retention, refresh_gauges, roll_partitions
from app.settings.groups import Detached, PartitionSettings, RetentionSettings
from app.store import gauges, partitions, retention
from app.store.partitions import PARENTS, Month, Span, attached_range, current_month, ensure_month
from app.store.pool import Connection, Pool, close, close_pool, connect, create_pool, transaction
from app.store.retention import Retired, detach_before, drop_detached
from tests.eventually import eventually
from tests.factories_history import add_runs, lease

TABLES = """
SELECT relname::text AS name FROM pg_class
WHERE relkind = 'r' AND relname ~ '^(job_run|run_attempt)_[0-9]{4}_[0-9]{2}$'
"""
PENDING = "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhdetachpending ORDER BY 1"
ADD_ATTEMPT = """
INSERT INTO run_attempt (run_id, scheduled_for, attempt, tenant_id, outcome, maybe_delivered, finished_at, worker,
                         lease_token)
SELECT id, scheduled_for, 1, tenant_id, 'delivered', true, now(), 'w', 'w/1/1' FROM job_run
"""


def _keep(months: int = 2) -> RetentionSettings:
    return RetentionSettings(months=months, detached=Detached.KEEP)


def _drop(months: int = 2) -> RetentionSettings:
    return RetentionSettings(months=months, detached=Detached.DROP)


class Past:
    """A database with six months of history, one finished run with its evidence in each."""

    def __init__(self, dsn: str, pool: Pool, conn: Connection, current: Month) -> None:
        self.dsn = dsn
        self.pool = pool
        self.conn = conn
        self.current = current
        self.tenant = TenantId(uuid4())

    def ago(self, months: int) -> Month:
        return self.current.plus(-months)

    def names(self, *months: int) -> list[str]:
        return [partitions.partition_name(parent, self.ago(month)) for month in months for parent in PARENTS]

    async def tables(self) -> set[str]:
        return {row["name"] for row in await self.conn.fetch(TABLES)}

    async def oldest(self) -> datetime:
        return (await attached_range(self.conn))[0].start

    async def pending(self) -> list[str]:
        return [row["name"] for row in await self.conn.fetch(PENDING)]

    async def add_open(self, month: Month) -> None:
        at = month.start + timedelta(days=3)
        await add_runs(self.conn, self.tenant, [(ScheduleId(uuid4()), at)], status="pending")


@pytest.fixture
async def past(each_server_dsn: str, each_server_pool: Pool, each_server_db: Connection) -> Past:
    found = Past(each_server_dsn, each_server_pool, each_server_db, await current_month(each_server_db))
    instants = [found.ago(month).start + timedelta(days=1) for month in range(1, 7)]
    await add_runs(each_server_db, found.tenant, [(ScheduleId(uuid4()), at) for at in instants])
    await each_server_db.execute(ADD_ATTEMPT)
    return found


async def test_rolling_makes_the_months_ahead_and_those_asked_for(pool: Pool, db: Connection) -> None:
    current = await current_month(db)
    await partitions.request(db, current.plus(9))
    await roll_partitions(pool, PartitionSettings(ahead=5))
    assert await attached_range(db) == [
        Span(current.start, current.plus(5).end),
        Span(current.plus(9).start, current.plus(9).end),
    ]
    assert await partitions.requested(db) == []


async def test_months_of_the_past_or_too_far_ahead_are_refused_and_told(
    pool: Pool, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    current = await current_month(db)
    before = await attached_range(db)
    for month in (current.plus(-1), current.plus(maintenance.FARTHEST_REQUEST + 1)):
        await partitions.request(db, month)
    with caplog.at_level(logging.WARNING):
        await roll_partitions(pool, PartitionSettings(ahead=3))
    assert await attached_range(db) == before
    assert await partitions.requested(db) == []
    assert [record.message for record in caplog.records] == ["partitions.request_refused"] * 2


async def test_replicas_rolling_together_make_each_month_once(pool: Pool, db: Connection) -> None:
    current = await current_month(db)
    await asyncio.gather(*(roll_partitions(pool, PartitionSettings(ahead=8)) for _ in range(5)))
    assert await attached_range(db) == [Span(current.start, current.plus(8).end)]


async def test_months_beyond_the_retention_are_kept_as_plain_tables(past: Past) -> None:
    assert await apply_retention(past.pool, _keep()) is None
    assert await past.oldest() == past.ago(2).start
    assert {*past.names(3, 4, 5, 6)} <= await past.tables()
    assert await past.conn.fetchval("SELECT count(*) FROM job_run") == 2
    assert await past.conn.fetchval("SELECT count(*) FROM run_attempt") == 2
    kept = partitions.partition_name("job_run", past.ago(6))
    assert await past.conn.fetchval(f"SELECT count(*) FROM {kept}") == 1
    assert await apply_retention(past.pool, _keep()) is None


async def test_months_beyond_the_retention_are_dropped_when_wished_also_those_kept_before(past: Past) -> None:
    await apply_retention(past.pool, _keep(4))
    assert {*past.names(5, 6)} <= await past.tables()
    await apply_retention(past.pool, _drop())
    tables = await past.tables()
    assert not tables & {*past.names(3, 4, 5, 6)}
    assert {*past.names(0, 1, 2)} <= tables
    assert await past.oldest() == past.ago(2).start


async def test_a_month_with_open_runs_stays_and_the_others_go(
    past: Past, caplog: pytest.LogCaptureFixture
) -> None:
    await past.add_open(past.ago(5))
    with caplog.at_level(logging.WARNING):
        await apply_retention(past.pool, _drop())
    tables = await past.tables()
    assert {*past.names(5)} <= tables
    assert not tables & {*past.names(3, 4, 6)}
    assert past.ago(5).start == await past.oldest()
    assert "retention.open_runs" in [record.message for record in caplog.records]
    await past.conn.execute(
        "UPDATE job_run SET status = 'failed', finished_at = now() WHERE status = 'pending'"
    )
    await apply_retention(past.pool, _drop())
    assert not await past.tables() & {*past.names(5)}


async def test_a_run_that_slips_in_while_its_month_is_detached_brings_the_month_back(past: Past) -> None:
    """The look for open runs and the detaching are two statements; here a writer comes between them."""
    month = past.ago(6)
    await past.add_open(month)
    name = partitions.partition_name("job_run", month)
    await past.conn.execute(f"ALTER TABLE job_run DETACH PARTITION {name} CONCURRENTLY")
    retired = await detach_before(past.conn, past.ago(2))
    assert retired.with_open_runs == [month]
    assert await past.oldest() == month.start
    await drop_detached(past.conn, past.ago(2), retired)
    assert await past.conn.fetchval("SELECT count(*) FROM job_run WHERE status = 'pending'") == 1


async def test_behind_a_long_read_retention_gives_up_and_tells_while_planning_and_claims_go_on(
    past: Past, caplog: pytest.LogCaptureFixture
) -> None:
    hasty = await create_pool(past.dsn, size=3, application_name="t", settings={"lock_timeout": "200ms"})
    async with _long_read(past.dsn) as read:
        for _ in range(2):  # the second pass meets what the first one left half done
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                assert await apply_retention(hasty, _drop()) == BLOCKED_PAUSE
            assert [record.message for record in caplog.records] == ["retention.blocked"]
            assert await past.pending() == [partitions.partition_name("job_run", past.ago(6))]
        await add_runs(past.conn, past.tenant, [(ScheduleId(uuid4()), past.current.start)], status="pending")
        assert (
            await past.conn.fetchval(
                "UPDATE job_run SET fire_after = now() WHERE status = 'pending' RETURNING 1"
            )
            == 1
        )
        assert await ensure_month(past.conn, past.current.plus(9)) != []
        assert (
            await past.oldest() == past.ago(5).start
        )  # the planner no longer counts on the half-detached month
        assert (
            len(await read.fetch("SELECT 1 FROM job_run WHERE scheduled_for < $1", past.current.start)) == 6
        )
    assert await apply_retention(hasty, _drop()) is None
    assert await past.pending() == []
    assert not await past.tables() & {*past.names(3, 4, 5, 6)}
    await close_pool(hasty)


async def test_detaching_that_was_killed_halfway_is_ended_by_the_next_pass(past: Past) -> None:
    victim = await connect(past.dsn, application_name="victim", settings={"lock_timeout": "60s"})
    pid = await victim.fetchval("SELECT pg_backend_pid()")
    async with _long_read(past.dsn):
        task = asyncio.create_task(detach_before(victim, past.ago(2)))
        assert await eventually(past.pending)
        await past.conn.execute("SELECT pg_terminate_backend($1, 5000)", pid)
        with pytest.raises(StoreUnavailable):
            await task
    assert await past.pending() != []
    await apply_retention(past.pool, _drop())
    assert await past.pending() == []
    assert not await past.tables() & {*past.names(3, 4, 5, 6)}


async def test_an_interrupted_detaching_is_undone_when_the_month_is_to_stay_after_all(past: Past) -> None:
    hasty = await connect(past.dsn, application_name="t", settings={"lock_timeout": "200ms"})
    async with _long_read(past.dsn):
        assert (await detach_before(hasty, past.ago(2))).blocked != []
    await close(hasty)
    assert (await detach_before(past.conn, past.ago(12))).blocked == []
    assert await past.oldest() == past.ago(6).start
    assert await past.conn.fetchval("SELECT count(*) FROM job_run") == 6


async def test_a_crash_between_any_two_steps_is_carried_on_by_the_next_pass(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = retention._try, 0

    async def crash_after_a_while(
        conn: Connection, composer: str, parent: str, old: Month, retired: Retired
    ) -> bool:
        nonlocal left
        if left == 0:
            raise ZeroDivisionError
        left -= 1
        return await real(conn, composer, parent, old, retired)

    monkeypatch.setattr(retention, "_try", crash_after_a_while)
    crashes = 0
    while True:
        left = 1
        try:
            await apply_retention(past.pool, _drop())
        except ZeroDivisionError:
            crashes += 1
            runs = {name[-7:] for name in await past.tables() if name.startswith("job_run")}
            attempts = {name[-7:] for name in await past.tables() if name.startswith("run_attempt")}
            assert attempts <= runs  # never evidence without its run
        else:
            break
    assert crashes == 4 * 4 - 1
    assert not await past.tables() & {*past.names(3, 4, 5, 6)}
    assert await past.conn.fetchval("SELECT count(*) FROM job_run") == 2


async def test_a_month_taken_out_is_not_made_again_and_refuses_runs(past: Past) -> None:
    await apply_retention(past.pool, _keep())
    with pytest.raises(PartitionMissing):
        async with transaction(past.pool) as conn:
            await conn.execute(
                "INSERT INTO job_run SELECT * FROM " + partitions.partition_name("job_run", past.ago(6))
            )
    await partitions.request(past.conn, past.ago(6))
    await roll_partitions(past.pool, PartitionSettings(ahead=3))
    assert await past.oldest() == past.ago(2).start


async def test_tables_that_are_not_named_by_our_rule_are_left_alone(past: Past) -> None:
    old = past.ago(30)
    await past.conn.execute(
        f"CREATE TABLE archive PARTITION OF job_run FOR VALUES FROM ('{old.start}') TO ('{old.end}')"
    )
    await past.conn.execute("CREATE TABLE job_run_2001_01_backup (id int)")
    await apply_retention(past.pool, _drop())
    assert await past.conn.fetchval("SELECT to_regclass('archive') IS NOT NULL")
    assert await past.conn.fetchval("SELECT to_regclass('job_run_2001_01_backup') IS NOT NULL")


async def test_retention_and_rolling_of_several_replicas_do_not_disturb_each_other(past: Past) -> None:
    crowd = await create_pool(past.dsn, size=12, application_name="crowd")
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(apply_retention(crowd, _drop()))
            group.create_task(roll_partitions(crowd, PartitionSettings(ahead=6)))
    await close_pool(crowd)
    await apply_retention(past.pool, _drop())
    await roll_partitions(past.pool, PartitionSettings(ahead=6))
    assert await attached_range(past.conn) == [Span(past.ago(2).start, past.current.plus(6).end)]


async def test_gauges_count_what_is_due_and_free(pool: Pool, db: Connection) -> None:
    now = await gauges.read_clock(db)
    current = await current_month(db)
    await ensure_month(db, current.plus(-1))
    tenant = TenantId(uuid4())
    hour, later = now - timedelta(hours=1), now + timedelta(hours=1)
    due = [hour.replace(microsecond=0) + timedelta(seconds=second) for second in range(5)]
    ids = await add_runs(db, tenant, [(ScheduleId(uuid4()), at) for at in due], status="pending")
    await add_runs(db, tenant, [(ScheduleId(uuid4()), later.replace(microsecond=0))], status="pending")
    await add_runs(db, tenant, [(ScheduleId(uuid4()), due[0])])
    await lease(db, ids[0], until=timedelta(minutes=1))
    await lease(db, ids[1], until=timedelta(minutes=-1))
    await refresh_gauges(pool)
    assert _value("scheduler_runs_due_backlog") == 4
    waited = (await gauges.read_clock(db) - due[1]).total_seconds()
    assert (now - due[1]).total_seconds() <= _value("scheduler_oldest_due_seconds") <= waited
    ahead = (current.plus(3).end - now).total_seconds()
    assert ahead - 600 < _value("scheduler_partition_horizon_seconds") <= ahead


async def test_an_idle_fleet_shows_zero_and_its_clock_agrees(pool: Pool) -> None:
    await refresh_gauges(pool)
    assert _value("scheduler_runs_due_backlog") == 0
    assert _value("scheduler_oldest_due_seconds") == 0
    assert abs(_value("scheduler_clock_skew_seconds")) < 2


async def test_the_backlog_is_counted_up_to_its_bound(
    db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "BACKLOG_BOUND", 3)
    now = (await gauges.read_clock(db)).replace(microsecond=0)
    await add_runs(db, TenantId(uuid4()), [(ScheduleId(uuid4()), now) for _ in range(10)], status="pending")
    assert (await gauges.read_figures(db)).due_backlog == 4


async def test_without_a_month_for_now_the_horizon_is_none_and_its_gauge_zero(
    pool: Pool, db: Connection
) -> None:
    name = partitions.partition_name("job_run", await current_month(db))
    await db.execute(f"ALTER TABLE job_run DETACH PARTITION {name}")
    assert (await gauges.read_figures(db)).partition_horizon is None
    await refresh_gauges(pool)
    assert _value("scheduler_partition_horizon_seconds") == 0


async def test_a_skewed_clock_is_told_with_its_sign(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fast(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(minutes=10)

    monkeypatch.setattr(maintenance, "datetime", Fast)
    await refresh_gauges(pool)
    assert 590 < _value("scheduler_clock_skew_seconds") < 610


async def test_gauges_that_cannot_be_measured_read_nan(pool: Pool, db: Connection) -> None:
    await refresh_gauges(pool)
    await close_pool(pool)
    with pytest.raises(StoreUnavailable):
        await refresh_gauges(pool)
    for name in ("runs_due_backlog", "oldest_due_seconds", "clock_skew_seconds", "partition_horizon_seconds"):
        assert math.isnan(_value(f"scheduler_{name}"))


def _value(name: str) -> float:
    found = metrics.REGISTRY.get_sample_value(name)
    assert found is not None
    return found


@asynccontextmanager
async def _long_read(dsn: str) -> AsyncIterator[Connection]:
    """A transaction that has read the whole history and stays open."""
    reader = await connect(
        dsn, application_name="long read", settings={"idle_in_transaction_session_timeout": "0"}
    )
    async with reader.transaction(isolation="repeatable_read", readonly=True):
        await reader.fetch("SELECT id FROM job_run")
        yield reader
    await close(reader)
