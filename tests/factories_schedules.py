"""Schedules for tests: made by the domain, written by the store, and looked at as plain rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from app.domain.ids import ScheduleId, TenantId, run_id
from app.domain.recurrence import Cron, Every, Once, Recurrence, next_fire
from app.domain.retry import RetryPolicy
from app.domain.schedule import (
    EXPIRES_AFTER_DEFAULT,
    Misfire,
    Overlap,
    Schedule,
    ScheduleStatus,
)
from app.domain.target import Target
from app.store import planning, schedules
from app.store.planning import Advance, NewRun
from app.store.pool import PLAN_GUARDS, Connection, Pool, Row, close_pool, create_pool
from tests import frozen
from tests.eventually import eventually
from tests.frozen import FrozenClock

HOURLY = Cron("0 * * * *", "UTC")
TARGET = Target("POST", "https://example.com/hook", (), "hello")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def every(seconds: float, anchor: datetime = EPOCH) -> Every:
    return Every(timedelta(seconds=seconds), anchor)


def once(at: datetime) -> Once:
    return Once(at)


def tenant() -> TenantId:
    return TenantId(uuid4())


def schedule(
    *,
    next_fire_at: datetime | None,
    tenant_id: TenantId | None = None,
    recurrence: Recurrence = HOURLY,
    misfire: Misfire = Misfire.FIRE_ONCE,
    overlap: Overlap = Overlap.ALLOW,
    expires_after: timedelta = EXPIRES_AFTER_DEFAULT,
    status: ScheduleStatus = ScheduleStatus.ACTIVE,
    retry: RetryPolicy | None = None,
    created_at: datetime = EPOCH,
) -> Schedule:
    """A schedule in any state, its pointer wherever the test needs it."""
    id = ScheduleId(uuid4())  # noqa: A001
    return Schedule(
        id=id,
        tenant_id=tenant_id or tenant(),
        name=f"schedule {id}",
        status=status,
        status_reason=None,
        version=1,
        recurrence=recurrence,
        target=TARGET,
        retry=retry or RetryPolicy(),
        misfire=misfire,
        overlap=overlap,
        expires_after=expires_after,
        next_fire_at=next_fire_at,
        last_fire_at=None,
        created_at=created_at,
        updated_at=created_at,
    )


async def given(conn: Connection, one: Schedule) -> Schedule:
    """Write it as it is."""
    await schedules.insert(conn, one.tenant_id, one)
    return one


async def given_many(conn: Connection, one: Schedule, count: int, *, tenants: int = 1) -> None:
    """Write `one` and `count - 1` copies with ids and tenants of their own."""
    await given(conn, one)
    await conn.execute(
        """INSERT INTO schedule SELECT s.* FROM schedule AS o, generate_series(2, $2) AS n,
               jsonb_populate_record(o, jsonb_build_object('id', gen_random_uuid(),
                   'tenant_id', md5((n % $3)::text)::uuid)) AS s
            WHERE o.id = $1""",
        one.id,
        count,
        tenants,
    )


async def plain(conn: Connection, one: Schedule) -> Row:
    """The schedule's row."""
    row = await conn.fetchrow("SELECT * FROM schedule WHERE id = $1", one.id)
    assert row is not None
    return row


async def runs_of(conn: Connection, one: Schedule) -> list[Row]:
    """The schedule's runs, oldest first."""
    return await conn.fetch("SELECT * FROM job_run WHERE schedule_id = $1 ORDER BY scheduled_for", one.id)


async def instants_of(conn: Connection, one: Schedule) -> list[datetime]:
    return [row["scheduled_for"] for row in await runs_of(conn, one)]


async def dispositions_of(conn: Connection, one: Schedule) -> list[tuple[datetime, datetime, int, str]]:
    rows = await conn.fetch(
        """SELECT first_at, last_at, occurrences, reason FROM disposition
            WHERE schedule_id = $1 ORDER BY first_at""",
        one.id,
    )
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def lease(conn: Connection, run: UUID, *, by: str = "other/1/1") -> None:
    """Give the run a live lease, as a claim does."""
    await conn.execute(
        """UPDATE job_run SET claimed_by = $2, claim_expires_at = now() + interval '1 minute', attempt = attempt + 1
            WHERE id = $1""",
        run,
        by,
    )


async def alter(conn: Connection, one: Schedule, values: Mapping[str, object]) -> None:
    """Write columns behind the application's back."""
    for column, value in values.items():
        await conn.execute(f"UPDATE schedule SET {column} = $2 WHERE id = $1", one.id, value)


def at(one: Schedule, **changes: object) -> Schedule:
    """`one` with some fields changed."""
    return replace(one, **changes)  # type: ignore[arg-type]


async def mid_month(clock: FrozenClock) -> datetime:
    """Stop the clock at noon in the middle of next month: months before and behind are attached, whatever
    today is.
    """
    today = await clock.now()
    return await clock.set(
        (today.replace(day=1) + timedelta(days=45)).replace(day=15, hour=12, minute=0, second=0)
    )


@asynccontextmanager
async def planner_pool(dsn: str, *, size: int = 4, clock: FrozenClock | None = None) -> AsyncIterator[Pool]:
    """A pool as the planner has it, with the frozen clock where one is given."""
    settings = {**PLAN_GUARDS, **(frozen.SESSION if clock else {})}
    opened = await create_pool(dsn, size=size, application_name="carillon tests, planner", settings=settings)
    try:
        yield opened
    finally:
        await close_pool(opened)


async def someone_waits(conn: Connection) -> None:
    """Until a session of this database waits for a lock."""

    async def waiting() -> bool:
        return bool(
            await conn.fetchval(
                """SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND wait_event_type = 'Lock'"""
            )
        )

    await eventually(waiting)


async def plan_by_hand(conn: Connection, one: Schedule, at: datetime, *, following: datetime) -> None:
    """What a planner writes for one occurrence, in the transaction of `conn`."""
    run = NewRun(
        run_id(one.id, at),
        at,
        one.tenant_id,
        one.id,
        one.version,
        one.retry.max_attempts,
        at + one.expires_after,
    )
    await planning.insert_runs(conn, [run])
    await planning.advance(conn, [Advance(one.id, at, following, at)])


def first_after(rule: Recurrence, after: datetime) -> datetime:
    first = next_fire(rule, after, schedule_id=ScheduleId(UUID(int=0)))
    assert first is not None
    return first


def instants_between(rule: Recurrence, after: datetime, until: datetime) -> list[datetime]:
    """The rule's instants later than `after`, up to `until`; for rules without `H`."""
    instants = []
    while (after := first_after(rule, after)) <= until:
        instants.append(after)
    return instants
