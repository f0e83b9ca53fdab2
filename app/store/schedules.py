"""Schedules as their tenant sees them. Deleted ones, and another tenant's, do not exist here.

Changes are in `app.store.edits`; what the planner reads is in `app.store.planning`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain import target as targets
from app.domain.ids import ScheduleId, TenantId
from app.domain.schedule import Damaged, Misfire, Overlap, Schedule, ScheduleStatus
from app.errors import Conflict, InvalidInput, NotFound
from app.store.pool import Connection

COLUMNS: Final = """id, tenant_id, name, status, status_reason, version,
       recurrence::text, target::text, retry::text, misfire, overlap, expires_after,
       next_fire_at, last_fire_at, created_at, updated_at"""
"""What `schedule_of` reads, in order."""


INSERT = """INSERT INTO schedule (id, tenant_id, name, status, status_reason, version, recurrence, target,
                      retry, misfire, overlap, expires_after, next_fire_at, last_fire_at, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7::jsonb, $8::jsonb, $9::jsonb, $10, $11, $12, $13, $14, $15, $16)"""


async def insert(conn: Connection, tenant: TenantId, schedule: Schedule) -> None:
    """Write a new schedule, made by `new_schedule` with `planning.database_now` of the same connection.

    Raises Conflict when the id is taken. A schedule of another tenant is a fault of the caller: ValueError.
    """
    if schedule.tenant_id != tenant:
        raise ValueError("a schedule is written by its own tenant only")
    await conn.execute(INSERT, *stored(schedule))


GET = f"""SELECT {COLUMNS}
  FROM schedule
 WHERE id = $2
   AND tenant_id = $1
   AND status <> 'deleted'"""


async def get(conn: Connection, tenant: TenantId, schedule: UUID) -> Schedule | Damaged:
    """The tenant's schedule. Raises NotFound."""
    row = await conn.fetchrow(GET, tenant, schedule)
    if row is None:
        raise NotFound
    return _seen(tuple(row))


NEWEST: Final = (datetime(9999, 12, 31, tzinfo=UTC), UUID(int=2**128 - 1))

LIST_PAGE = f"""SELECT {COLUMNS}
  FROM schedule
 WHERE tenant_id = $1
   AND (created_at, id) < ($2::timestamptz, $3::uuid)
   AND status <> 'deleted'
   AND ($4::text IS NULL OR status = $4)
 ORDER BY created_at DESC, id DESC
 LIMIT $5"""


async def list_page(
    conn: Connection,
    tenant: TenantId,
    *,
    status: ScheduleStatus | None = None,
    after: tuple[datetime, UUID] | None = None,
    limit: int,
) -> list[Schedule | Damaged]:
    """At most `limit` schedules, newest first, behind `after`: (created_at, id) of the last one seen."""
    rows = await conn.fetch(LIST_PAGE, tenant, *(after or NEWEST), status, limit)
    return [_seen(tuple(row)) for row in rows]


def stored(schedule: Schedule) -> tuple[object, ...]:
    """The values of a row, in the order of `COLUMNS`."""
    return (
        schedule.id,
        schedule.tenant_id,
        schedule.name,
        schedule.status,
        schedule.status_reason,
        schedule.version,
        json.dumps(recurrences.to_json(schedule.recurrence)),
        targets.to_json(schedule.target),
        retries.to_json(schedule.retry),
        schedule.misfire,
        schedule.overlap,
        schedule.expires_after,
        schedule.next_fire_at,
        schedule.last_fire_at,
        schedule.created_at,
        schedule.updated_at,
    )


def schedule_of(row: tuple[Any, ...]) -> Schedule:
    """The schedule of a row of `COLUMNS`. Raises Conflict for JSON that cannot be understood: such a schedule can only
    be deleted.
    """
    (key, tenant, name, status, status_reason, version, recurrence, target, retry, misfire, overlap) = row[
        :11
    ]
    (expires_after, next_fire_at, last_fire_at, created_at, updated_at) = row[11:]
    try:
        return Schedule(
            id=ScheduleId(key),
            tenant_id=TenantId(tenant),
            name=name,
            status=ScheduleStatus(status),
            status_reason=status_reason,
            version=version,
            recurrence=recurrences.from_json(recurrence),
            target=targets.from_json(target),
            retry=retries.from_json(retry),
            misfire=Misfire(misfire),
            overlap=Overlap(overlap),
            expires_after=expires_after,
            next_fire_at=next_fire_at,
            last_fire_at=last_fire_at,
            created_at=created_at,
            updated_at=updated_at,
        )
    except (
        InvalidInput,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ) as error:  # the three readers' refusals
        raise Conflict(
            f"the schedule cannot be understood any more and can only be deleted: {error}"
        ) from error


def _seen(row: tuple[Any, ...]) -> Schedule | Damaged:
    try:
        return schedule_of(row)
    except Conflict as error:
        return Damaged(
            id=ScheduleId(row[0]),
            name=row[2],
            status=ScheduleStatus(row[3]),
            version=row[5],
            problem=str(error),
            misfire=Misfire(row[9]),
            overlap=Overlap(row[10]),
            expires_after=row[11],
            next_fire_at=row[12],
            last_fire_at=row[13],
            created_at=row[14],
            updated_at=row[15],
        )
