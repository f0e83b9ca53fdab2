"""Taking old months of history out: detach them, and drop them if that is wished.

A month goes in small steps, each safe to be the last one before a crash, and each pass carries on where the one
before it ended:

    1 `job_run`'s month is detached, unless it has open runs
    2 the detached month is looked at again: a run that came in meanwhile brings the month back
    3 `run_attempt`'s month is detached; from now on the month counts as taken out
    4 if wished, both tables are dropped

DETACH … CONCURRENTLY lets reads and writes go on, but has to wait for every transaction that has used the table. It
waits for the session's lock_timeout and then gives up, which leaves the partition "pending detach": no statement
that begins later sees it, and no other month can be detached before FINALIZE has ended this one. One statement and
one table at a time: detaching months of both tables in one transaction takes locks in an order that deadlocks with
writers.

Nothing here runs inside a transaction, and only one session does this at a time (`maintenance` sees to it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from app.errors import StoreUnavailable
from app.store.partitions import PARENTS, Month, bounds_of, partition_name
from app.store.pool import Connection, translated

RUNS, ATTEMPTS = PARENTS


class _Place(StrEnum):
    """Where a month's table is."""

    ATTACHED = "attached"
    PENDING = "pending"
    DETACHED = "detached"


@dataclass(slots=True)
class Retired:
    """What one pass did. `blocked` months wait for an older transaction (a long read) and are tried again."""

    detached: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    with_open_runs: list[Month] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)


async def detach_before(conn: Connection, month: Month) -> Retired:
    """Detach all months before `month`, oldest first; months with open runs stay.

    Also ends what an interrupted pass began, of whatever month. A step that cannot have its lock within the session's
    lock_timeout ends the pass and is reported as `blocked`; a lost database raises StoreUnavailable.
    """
    retired = Retired()
    with translated():
        for parent in PARENTS:
            if not await _finish_interrupted(conn, parent, retired):
                return retired
        runs, attempts = await _places(conn, RUNS), await _places(conn, ATTEMPTS)
        for old in sorted({*runs, *attempts}):
            if attempts.get(old) is not _Place.ATTACHED and runs.get(old) is not _Place.ATTACHED:
                continue  # taken out already
            if old >= month:
                if runs.get(old) is _Place.DETACHED:
                    await _attach(conn, RUNS, old)  # begun under a shorter retention
            elif not await _take_out(conn, old, runs.get(old), attempts.get(old), retired):
                return retired
    return retired


async def drop_detached(conn: Connection, month: Month, retired: Retired) -> None:
    """Drop the tables of all months before `month` that are taken out completely, also those kept so far."""
    with translated():
        runs, attempts = await _places(conn, RUNS), await _places(conn, ATTEMPTS)
        for old in sorted(found for found in {*runs, *attempts} if found < month):
            if {runs.get(old), attempts.get(old)} <= {_Place.DETACHED, None}:
                for parent, places in ((ATTEMPTS, attempts), (RUNS, runs)):
                    if old in places and await _try(conn, DROP_DDL, parent, old, retired):
                        retired.dropped.append(partition_name(parent, old))


async def _take_out(
    conn: Connection, old: Month, runs: _Place | None, attempts: _Place | None, retired: Retired
) -> bool:
    """Steps 1 to 3 for one month; False when a step was blocked."""
    if runs is _Place.ATTACHED:
        if await conn.fetchval(HAS_OPEN_RUNS, old.start, old.end):
            retired.with_open_runs.append(old)
            return True
        if not await _try(conn, DETACH_DDL, RUNS, old, retired):
            return False
        retired.detached.append(partition_name(RUNS, old))
    if runs is not None and await _has_open_runs_outside(conn, old):
        await _attach(conn, RUNS, old)
        retired.with_open_runs.append(old)
        return True
    if attempts is _Place.ATTACHED:
        if not await _try(conn, DETACH_DDL, ATTEMPTS, old, retired):
            return False
        retired.detached.append(partition_name(ATTEMPTS, old))
    return True


PLACES = """
SELECT c.relname::text AS name,
       CASE WHEN i.inhrelid IS NULL THEN 'detached' WHEN i.inhdetachpending THEN 'pending' ELSE 'attached' END AS place
FROM pg_class p
JOIN pg_class c ON c.relnamespace = p.relnamespace AND c.relkind = 'r'
               AND c.relname ~ ('^' || p.relname || '_[0-9]{4}_[0-9]{2}$')
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = p.oid
WHERE p.oid = $1::text::regclass
"""


async def _places(conn: Connection, parent: str) -> dict[Month, _Place]:
    """Where each month's table is. Only tables named by our rule count: others are not ours to touch."""
    rows = await conn.fetch(PLACES, parent)
    return {_month_of(row["name"]): _Place(row["place"]) for row in rows}


def _month_of(name: str) -> Month:
    return Month(int(name[-7:-3]), int(name[-2:]))


HAS_OPEN_RUNS = """
SELECT EXISTS (
    SELECT 1 FROM job_run
    WHERE scheduled_for >= $1 AND scheduled_for < $2 AND status IN ('pending', 'retrying')
)
"""

OPEN_RUNS_OUTSIDE_QUERY = """
SELECT format('SELECT EXISTS (SELECT 1 FROM %I.%I WHERE status IN (''pending'', ''retrying''))', n.nspname, $2::text)
FROM pg_class p JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE p.oid = $1::text::regclass
"""


async def _has_open_runs_outside(conn: Connection, old: Month) -> bool:
    """Has the detached table of `old` open runs? Nothing can write it any more, so the answer stays true."""
    question = await conn.fetchval(OPEN_RUNS_OUTSIDE_QUERY, RUNS, partition_name(RUNS, old))
    return bool(await conn.fetchval(question))


PENDING = """
SELECT c.relname::text AS name
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = $1::text::regclass AND i.inhdetachpending
"""


async def _finish_interrupted(conn: Connection, parent: str, retired: Retired) -> bool:
    """End the detaching that an earlier pass left half done (PostgreSQL allows one per parent); False if blocked."""
    for row in await conn.fetch(PENDING, parent):
        if not await _try(conn, FINALIZE_DDL, parent, _month_of(row["name"]), retired):
            return False
        retired.detached.append(row["name"])
    return True


# Composed by the server's own format(), which quotes. The parent's schema is used whatever the search_path says.
DETACH_DDL = """
SELECT format('ALTER TABLE %I.%I DETACH PARTITION %I.%I CONCURRENTLY', n.nspname, p.relname, n.nspname, $2::text)
FROM pg_class p JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE p.oid = $1::text::regclass
"""
FINALIZE_DDL = """
SELECT format('ALTER TABLE %I.%I DETACH PARTITION %I.%I FINALIZE', n.nspname, p.relname, n.nspname, $2::text)
FROM pg_class p JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE p.oid = $1::text::regclass
"""
DROP_DDL = """
SELECT format('DROP TABLE %I.%I', n.nspname, $2::text)
FROM pg_class p JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE p.oid = $1::text::regclass
"""


async def _try(conn: Connection, composer: str, parent: str, old: Month, retired: Retired) -> bool:
    """Run one schema change on one month's table; False, and reported as blocked, when it could not have its lock."""
    name = partition_name(parent, old)
    statement = await conn.fetchval(composer, parent, name)
    try:
        with translated():
            await conn.execute(statement)
    except StoreUnavailable:
        if conn.is_closed():
            raise
        retired.blocked.append(name)
        return False
    return True


ATTACH_DDL = """
SELECT format('ALTER TABLE %I.%I ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
              n.nspname, p.relname, n.nspname, $2::text, $3::text, $4::text)
FROM pg_class p JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE p.oid = $1::text::regclass
"""


async def _attach(conn: Connection, parent: str, old: Month) -> None:
    """Bring a month back; its CHECK spares the scan. Raises StoreUnavailable when the lock cannot be had."""
    statement = await conn.fetchval(ATTACH_DDL, parent, partition_name(parent, old), *bounds_of(old))
    await conn.execute(statement)
