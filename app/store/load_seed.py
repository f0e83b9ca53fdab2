"""What load runs write before they measure: tenants, schedules and runs by COPY. The harness alone calls this.

Nothing here is for a database with data of anybody else: `require_ours` says so, `clear` empties every table of runs
and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from app.domain.ids import RunId, ScheduleId, TenantId
from app.errors import ConfigError
from app.store.pool import Connection, translated

TENANT_NAME: Final = "carillon load"
"""Tenants of load runs are known by this beginning of their names."""

PATIENCE: Final = timedelta(hours=2)
"""For one COPY. The client's own bound; the session that copies is opened without a statement_timeout."""


FOREIGN_DATA = """SELECT EXISTS (SELECT 1 FROM tenant WHERE NOT starts_with(name, $1))
    OR (EXISTS (SELECT 1 FROM schedule) AND NOT EXISTS (SELECT 1 FROM tenant))
    OR (EXISTS (SELECT 1 FROM job_run) AND NOT EXISTS (SELECT 1 FROM tenant))"""


async def require_ours(conn: Connection) -> None:
    """Raises ConfigError when the database holds anything that no load run has made."""
    with translated():
        is_foreign = await conn.fetchval(FOREIGN_DATA, TENANT_NAME)
    if is_foreign:
        raise ConfigError(
            "the database holds tenants that no load run has made; a load run empties its tables, so give it a "
            "database of its own"
        )


# Not a statement that can be prepared, hence the form of the name.
_CLEAR = "TRUNCATE schedule, job_run, run_attempt, disposition, api_key, tenant"


async def clear(conn: Connection) -> None:
    """Empty the tables that a load run fills. Raises ConfigError for a database with foreign data."""
    await require_ours(conn)
    with translated():
        await conn.execute(_CLEAR)


TAKE_BACK_RUNS = "DELETE FROM job_run WHERE scheduled_for BETWEEN $1 AND $2"
TAKE_BACK_SCHEDULES = (
    "DELETE FROM schedule WHERE next_fire_at BETWEEN $1 AND $2 OR last_fire_at BETWEEN $1 AND $2"
)


async def take_back(conn: Connection, since: datetime, until: datetime) -> None:
    """Remove schedules that were seeded too late for the instants from `since` to `until`, and what became of them."""
    with translated():
        async with conn.transaction():
            await conn.execute(TAKE_BACK_SCHEDULES, since, until)
            await conn.execute(TAKE_BACK_RUNS, since, until)


@dataclass(frozen=True, slots=True)
class SeededSchedule:
    """A schedule as it is copied in; the texts are JSON as their domain modules write it."""

    id: ScheduleId
    tenant_id: TenantId
    recurrence: str
    target: str
    retry: str
    next_fire_at: datetime


async def copy_tenants(conn: Connection, tenants: Iterable[TenantId], *, at: datetime) -> None:
    """Write tenants that `require_ours` knows again."""
    rows = ((tenant, f"{TENANT_NAME} {place}", at) for place, tenant in enumerate(tenants, start=1))
    with translated():
        await conn.copy_records_to_table(
            "tenant",
            records=rows,
            columns=("id", "name", "created_at"),
            timeout=PATIENCE.total_seconds(),
        )


SCHEDULE_COLUMNS: Final = (
    *("id", "tenant_id", "name", "status", "version", "recurrence", "target", "retry", "misfire", "overlap"),
    *("expires_after", "next_fire_at", "created_at", "updated_at"),
)


async def copy_schedules(
    conn: Connection, schedules: Iterable[SeededSchedule], *, expires_after: timedelta, at: datetime
) -> None:
    """Write active schedules in one COPY, so that a planner sees all of them at once or none.

    `at` is their time of creation.
    """
    rows = (
        (
            one.id,
            one.tenant_id,
            "load",
            "active",
            1,
            one.recurrence,
            one.target,
            one.retry,
            "fire_once",
            "allow",
            expires_after,
            one.next_fire_at,
            at,
            at,
        )
        for one in schedules
    )
    with translated():
        await conn.copy_records_to_table(
            "schedule", records=rows, columns=SCHEDULE_COLUMNS, timeout=PATIENCE.total_seconds()
        )


@dataclass(frozen=True, slots=True)
class SeededRun:
    """A planned run, never attempted, due at its instant."""

    id: RunId
    scheduled_for: datetime
    tenant_id: TenantId
    schedule_id: ScheduleId


RUN_COLUMNS: Final = (
    *("id", "scheduled_for", "tenant_id", "schedule_id", "schedule_version", "idempotency_key", "origin"),
    *("status", "fire_after", "attempt", "max_attempts", "expires_at", "created_at"),
)


async def copy_runs(
    conn: Connection,
    runs: Iterable[SeededRun],
    *,
    max_attempts: int,
    expires_after: timedelta,
    at: datetime,
) -> None:
    """Write runs as the planner does, `at` being their time of planning. Their months must be attached."""
    rows = (
        (
            one.id,
            one.scheduled_for,
            one.tenant_id,
            one.schedule_id,
            1,
            one.id,
            "schedule",
            "pending",
            one.scheduled_for,
            0,
            max_attempts,
            one.scheduled_for + expires_after,
            at,
        )
        for one in runs
    )
    with translated():
        await conn.copy_records_to_table(
            "job_run", records=rows, columns=RUN_COLUMNS, timeout=PATIENCE.total_seconds()
        )


ENDED_COLUMNS: Final = (*RUN_COLUMNS, "finished_at", "reason")
ATTEMPT_COLUMNS: Final = (
    *("run_id", "scheduled_for", "attempt", "tenant_id", "schedule_version", "outcome", "maybe_delivered"),
    *("status_code", "started_at", "finished_at", "connect_us", "first_byte_us", "total_us", "request"),
    *("response_excerpt", "worker", "lease_token"),
)
SENT: Final = (
    '{"method":"POST","url":"https://receiver.example.com/hooks/4711","headers":'
    '{"Content-Type":"application/json","user-agent":"Carillon"},"body_bytes":39}'
)


async def copy_history(
    conn: Connection, runs: Sequence[SeededRun], *, failed: Callable[[int], bool], took: timedelta
) -> None:
    """Write runs that have ended, each with the evidence of its one attempt; `failed` tells of the n-th whether it has.

    Their months must be attached.
    """
    ended = (
        (
            *(one.id, one.scheduled_for, one.tenant_id, one.schedule_id, 1, one.id, "schedule"),
            "failed" if failed(number) else "succeeded",
            *(one.scheduled_for, 1, 1, one.scheduled_for + timedelta(days=1), one.scheduled_for),
            one.scheduled_for + took,
            "attempts_spent" if failed(number) else None,
        )
        for number, one in enumerate(runs)
    )
    attempts = (
        (
            *(one.id, one.scheduled_for, 1, one.tenant_id, 1),
            *(("rejected", True, 503) if failed(number) else ("delivered", True, 200)),
            *(one.scheduled_for, one.scheduled_for + took, 150, 4_000, 4_100, SENT, "ok", "history"),
            f"history/{number}",
        )
        for number, one in enumerate(runs)
    )
    patience = PATIENCE.total_seconds()
    with translated():
        await conn.copy_records_to_table("job_run", records=ended, columns=ENDED_COLUMNS, timeout=patience)
        await conn.copy_records_to_table(
            "run_attempt", records=attempts, columns=ATTEMPT_COLUMNS, timeout=patience
        )


# Not a statement that can be prepared, hence the form of the name.
_VACUUM_HISTORY = "VACUUM (ANALYZE) job_run, run_attempt"


async def vacuum_history(conn: Connection) -> None:
    """Bring the history into the state in which autovacuum leaves one that has grown slowly."""
    with translated():
        await conn.execute(_VACUUM_HISTORY, timeout=PATIENCE.total_seconds())


# Not a statement that can be prepared, hence the form of the name.
_VACUUM_SCHEDULES = "VACUUM (ANALYZE) schedule"


async def vacuum_schedules(conn: Connection) -> None:
    """Bring the table of schedules into the state in which autovacuum leaves one that has grown slowly."""
    with translated():
        await conn.execute(_VACUUM_SCHEDULES, timeout=PATIENCE.total_seconds())


# Not a statement that can be prepared, hence the form of the name.
_CHECKPOINT = "CHECKPOINT"


async def checkpoint(conn: Connection) -> None:
    """Write out what seeding has made dirty, so that no checkpoint for it falls into what is measured."""
    with translated():
        await conn.execute(_CHECKPOINT, timeout=PATIENCE.total_seconds())


def tenant_id(place: int) -> TenantId:
    """The id of a load run's tenant; 1 is the first."""
    return TenantId(UUID(int=place))
