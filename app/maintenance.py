"""What the fleet does for its tables and its gauges. Bodies of loops: each is one turn, callable by itself.

Every replica runs them; the months are one replica's work at a time, and the others skip their turn.
"""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

from app import metrics
from app.errors import StoreError
from app.settings.groups import Detached, PartitionSettings, RetentionSettings
from app.store import gauges, partitions, retention
from app.store.pool import Connection, Pool, acquire

logger = logging.getLogger(__name__)

FARTHEST_REQUEST: Final = 24
"""Months ahead that may be asked for: each partition makes every claim a little dearer."""
BLOCKED_PAUSE: Final = timedelta(minutes=5)
"""After a long read has held retention up."""
CLOCK_READINGS: Final = 3


async def roll_partitions(pool: Pool, settings: PartitionSettings) -> None:
    """Have the current month, the months ahead and those asked for. Raises StoreUnavailable."""
    async with partitions.sole_maintainer(pool) as conn:
        if conn is None:
            return
        made = await partitions.ensure_ahead(conn, months=settings.ahead)
        made += await _make_requested(conn)
        if made:
            logger.info("partitions.made", extra={"partitions": made})


async def _make_requested(conn: Connection) -> list[str]:
    """Make the months asked for. Past ones are refused: they were taken out, and an empty table in their place would
    no longer guard against planning their occurrences again."""
    current = await partitions.current_month(conn)
    made: list[str] = []
    asked = await partitions.requested(conn)
    for month in asked:
        if current <= month <= current.plus(FARTHEST_REQUEST):
            made += await partitions.ensure_month(conn, month)
        else:
            logger.warning("partitions.request_refused", extra={"month": str(month)})
    await partitions.withdraw(conn, asked)
    return made


async def apply_retention(pool: Pool, settings: RetentionSettings) -> timedelta | None:
    """Take out the months older than `settings.months`; returns an earlier next turn when a long read was in the way.

    Raises StoreUnavailable.
    """
    async with partitions.sole_maintainer(pool) as conn:
        if conn is None:
            return None
        oldest_kept = (await partitions.current_month(conn)).plus(-settings.months)
        retired = await retention.detach_before(conn, oldest_kept)
        match settings.detached:
            case Detached.DROP:
                await retention.drop_detached(conn, oldest_kept, retired)
            case Detached.KEEP:
                pass
            case _:
                assert_never(settings.detached)
    return _report(retired)


def _report(retired: retention.Retired) -> timedelta | None:
    if retired.detached or retired.dropped:
        extra = {"detached": retired.detached, "dropped": retired.dropped}
        logger.info("retention.applied", extra=extra)
    if retired.with_open_runs:
        months = [str(month) for month in retired.with_open_runs]
        logger.warning("retention.open_runs", extra={"months": months})
    if retired.blocked:
        logger.error("retention.blocked", extra={"partitions": retired.blocked})
        return BLOCKED_PAUSE
    return None


async def refresh_gauges(pool: Pool) -> None:
    """Measure backlog, oldest due run, clock skew and partition horizon. What cannot be measured reads NaN.

    Raises StoreUnavailable.
    """
    try:
        async with acquire(pool) as conn:
            skew = await _read_skew(conn)
            figures = await gauges.read_figures(conn)
    except StoreError:
        _forget()
        raise
    metrics.CLOCK_SKEW_SECONDS.set(skew.total_seconds())
    metrics.RUNS_DUE_BACKLOG.set(figures.due_backlog)
    metrics.OLDEST_DUE_SECONDS.set(figures.oldest_due.total_seconds())
    ahead = (figures.partition_horizon or figures.database_now) - figures.database_now
    metrics.PARTITION_HORIZON_SECONDS.set(ahead.total_seconds())


async def _read_skew(conn: Connection) -> timedelta:
    """This machine's clock minus the database's, taken at the middle of the shortest of a few round trips."""
    readings: list[tuple[timedelta, timedelta]] = []
    for _ in range(CLOCK_READINGS):
        before = datetime.now(UTC)
        theirs = await gauges.read_clock(conn)
        round_trip = datetime.now(UTC) - before
        readings.append((round_trip, before + round_trip / 2 - theirs))
    return min(readings)[1]


def _forget() -> None:
    """An old figure must not pass for a new one."""
    for gauge in (
        metrics.CLOCK_SKEW_SECONDS,
        metrics.RUNS_DUE_BACKLOG,
        metrics.OLDEST_DUE_SECONDS,
        metrics.PARTITION_HORIZON_SECONDS,
    ):
        gauge.set(math.nan)
