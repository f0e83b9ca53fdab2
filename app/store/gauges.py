"""What the fleet's gauges show, read from the database in bounded time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from app.store import partitions
from app.store.pool import Connection, translated

BACKLOG_BOUND: Final = 200_000
"""The backlog is counted up to here, plus one."""


@dataclass(frozen=True, slots=True)
class Figures:
    """`due_backlog` counts open runs that are due and under no live lease, up to BACKLOG_BOUND + 1. `oldest_due`
    is how long the first of them has been due, zero without one. `partition_horizon` is where the months end that
    runs can be written for; None when there is none for now."""

    due_backlog: int
    oldest_due: timedelta
    database_now: datetime
    partition_horizon: datetime | None


# Both walk the due index from its old end and stop at their bound.
READ_BACKLOG = """
SELECT now() AS database_now,
       (SELECT count(*) FROM (
            SELECT 1 FROM job_run
            WHERE status IN ('pending', 'retrying') AND fire_after <= now()
              AND (claim_expires_at IS NULL OR claim_expires_at <= now())
            LIMIT $1
        ) AS counted) AS due_backlog,
       (SELECT fire_after FROM job_run
         WHERE status IN ('pending', 'retrying') AND fire_after <= now()
           AND (claim_expires_at IS NULL OR claim_expires_at <= now())
         ORDER BY fire_after, id
         LIMIT 1) AS oldest_due
"""


async def read_figures(conn: Connection) -> Figures:
    """Measure once. Not for connections under PLAN_GUARDS. Raises StoreUnavailable."""
    with translated():
        row = await conn.fetchrow(READ_BACKLOG, BACKLOG_BOUND + 1)
    assert row is not None
    now, oldest = row["database_now"], row["oldest_due"]
    return Figures(
        due_backlog=row["due_backlog"],
        oldest_due=max(now - oldest, timedelta()) if oldest is not None else timedelta(),
        database_now=now,
        partition_horizon=await partitions.horizon(conn, now=now),
    )


READ_CLOCK = "SELECT now() AS database_now"


async def read_clock(conn: Connection) -> datetime:
    """The database's clock, in one round trip. Raises StoreUnavailable."""
    with translated():
        now: datetime = await conn.fetchval(READ_CLOCK)
    return now
