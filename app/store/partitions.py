"""The months of `job_run` and `run_attempt`: made ahead of time, known to the planner, retired by retention.

A month is made by CREATE TABLE … LIKE, CHECK and ATTACH, which asks for SHARE UPDATE EXCLUSIVE only: reads
and claims go on. `PARTITION OF` asks for ACCESS EXCLUSIVE: behind one open history read it stalled every
claim for seconds. There is no DEFAULT partition (it forbids detaching concurrently): a row without a month is
refused, and the one who needs it asks for the month with `request` and waits for maintenance.

Months are UTC months, whatever the session's time zone. Every function here takes a plain connection outside
a transaction, unless it says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Final

from app.errors import StoreError
from app.store.pool import Connection, Pool, acquire, transaction, translated


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A calendar month in UTC, years 1970 to 9998."""

    year: int
    month: int

    def __post_init__(self) -> None:
        if not (1970 <= self.year <= 9998 and 1 <= self.month <= 12):
            raise ValueError(f"no month for partitions: {self.year}-{self.month}")

    @classmethod
    def of(cls, instant: datetime) -> Month:
        """The month that `instant` (aware) lies in."""
        if instant.tzinfo is None:
            raise ValueError(f"an instant needs a zone: {instant.isoformat()}")
        utc = instant.astimezone(UTC)
        return cls(utc.year, utc.month)

    @property
    def start(self) -> datetime:
        return datetime(self.year, self.month, 1, tzinfo=UTC)

    @property
    def end(self) -> datetime:
        """The first instant after the month."""
        return self.plus(1).start

    def plus(self, months: int) -> Month:
        count = self.year * 12 + (self.month - 1) + months
        return Month(count // 12, count % 12 + 1)

    def __str__(self) -> str:
        return f"{self.year:04}-{self.month:02}"


@dataclass(frozen=True, slots=True)
class Span:
    """A gapless stretch of attached months, from `start` to before `end`."""

    start: datetime
    end: datetime

    def __contains__(self, instant: datetime) -> bool:
        return self.start <= instant < self.end


PARENTS: Final = ("job_run", "run_attempt")
"""Always in this order, so that two makers never wait for each other."""


CURRENT_MONTH = """
SELECT extract(year FROM now() AT TIME ZONE 'UTC')::int AS year,
       extract(month FROM now() AT TIME ZONE 'UTC')::int AS month
"""


async def current_month(conn: Connection) -> Month:
    """The month that the database is in."""
    with translated():
        row = await conn.fetchrow(CURRENT_MONTH)
    assert row is not None
    return Month(row["year"], row["month"])


async def ensure_ahead(conn: Connection, *, months: int) -> list[str]:
    """Have the current month and the next `months`; return the names of the partitions made now."""
    current = await current_month(conn)
    made: list[str] = []
    for offset in range(months + 1):
        made += await ensure_month(conn, current.plus(offset))
    return made


# One maker at a time, for as long as its transaction lasts.
LOCK_MAKERS = "SELECT pg_advisory_xact_lock(4919231477)"


async def ensure_month(conn: Connection, month: Month) -> list[str]:
    """Have this month in both tables; return the names of the partitions made now (none when all is there).

    Safe against itself from any number of sessions. Waits at most the session's lock_timeout for other schema
    changes, then raises StoreUnavailable. Raises StoreError for a month that retention has taken out: making
    it again would make a table without the old rows, which no longer guards against planning them twice.
    """
    with translated():
        async with conn.transaction():
            await conn.execute(LOCK_MAKERS)
            return [name for parent in PARENTS for name in await _ensure(conn, parent, month)]


PARTITION_STATE = """
SELECT format('%I', $2::text) AS name, i.inhparent IS NOT NULL AS is_attached
FROM pg_class p
JOIN pg_class c ON c.relnamespace = p.relnamespace AND c.relname = $2
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = p.oid
WHERE p.oid = $1::text::regclass
"""

# The statements are composed by the server's own format(), which quotes; the parent's schema is used whatever
# the search_path says. Leases and retries update a run in place, so its pages are half empty for HOT; the
# evidence is written once. Vacuum starts early and does not pause: dead entries at the head of the due index
# slow every claim.
PARTITION_DDL = """
SELECT ARRAY[
    format('CREATE TABLE %I.%I (LIKE %I.%I INCLUDING ALL) WITH ('
           || CASE p.relname WHEN 'job_run' THEN 'fillfactor = 50, ' ELSE '' END
           || 'autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0, '
           || 'autovacuum_analyze_scale_factor = 0.02)',
           n.nspname, $2::text, n.nspname, p.relname),
    format('ALTER TABLE %I.%I ADD CONSTRAINT %I CHECK (scheduled_for >= %L AND scheduled_for < %L)',
           n.nspname, $2, $2 || '_month', $3::text, $4::text),
    format('ALTER TABLE %I.%I ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
           n.nspname, p.relname, n.nspname, $2, $3, $4)
] AS statements
FROM pg_class p JOIN pg_namespace n ON n.oid = p.relnamespace
WHERE p.oid = $1::text::regclass
"""


async def _ensure(conn: Connection, parent: str, month: Month) -> list[str]:
    name = partition_name(parent, month)
    state = await conn.fetchrow(PARTITION_STATE, parent, name)
    if state is not None and state["is_attached"]:
        return []
    if state is not None:
        raise StoreError(f"month {month} of {parent} was taken out by retention and is not made again")
    statements: list[str] = await conn.fetchval(PARTITION_DDL, parent, name, *bounds_of(month))
    for statement in statements:
        await conn.execute(statement)
    return [name]


def bounds_of(month: Month) -> tuple[str, str]:
    """First instant, and first instant after, as texts with +00:00, so that no session's time zone matters."""
    return month.start.isoformat(), month.end.isoformat()


def partition_name(parent: str, month: Month) -> str:
    """`job_run_2026_01`"""
    return f"{parent}_{month.year:04}_{month.month:02}"


# The session is idle in this transaction while the other one works: without a snapshot, so it holds nothing back.
LONGER_IDLE = "SET LOCAL idle_in_transaction_session_timeout = '5min'"
TRY_MAINTAINER = "SELECT pg_try_advisory_xact_lock(4919231478)"


@asynccontextmanager
async def sole_maintainer(pool: Pool) -> AsyncIterator[Connection | None]:
    """Lend a connection, outside a transaction, to the one session of the fleet that may change months; None to the
    others.

    The right is an advisory lock of a second connection's transaction: statements that detach concurrently cannot
    stand in a transaction, and a lock of a pooled session would outlive its user.
    """
    async with transaction(pool) as holder:
        if not await holder.fetchval(TRY_MAINTAINER):
            yield None
            return
        await holder.execute(LONGER_IDLE)
        async with acquire(pool) as conn:
            yield conn


REQUEST = """
INSERT INTO partition_request (month, requested_at) VALUES ($1, now()) ON CONFLICT (month) DO NOTHING
"""


async def request(conn: Connection, month: Month) -> None:
    """Ask maintenance for a month. May stand in a transaction."""
    with translated():
        await conn.execute(REQUEST, date(month.year, month.month, 1))


REQUESTED = "SELECT month FROM partition_request ORDER BY month"


async def requested(conn: Connection) -> list[Month]:
    """The months somebody has asked for, oldest first."""
    with translated():
        rows = await conn.fetch(REQUESTED)
    return [Month(row["month"].year, row["month"].month) for row in rows]


WITHDRAW = "DELETE FROM partition_request WHERE month = ANY($1::date[])"


async def withdraw(conn: Connection, months: Sequence[Month]) -> None:
    """Forget the requests for these months: they are there now, or will never be."""
    with translated():
        await conn.execute(WITHDRAW, [date(month.year, month.month, 1) for month in months])


ATTACHED = """
SELECT pg_get_expr(c.relpartbound, c.oid) AS bounds
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = $1::text::regclass AND NOT i.inhdetachpending
"""

PARTITION_BOUNDS: Final = re.compile(r"FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)")


async def attached_range(conn: Connection) -> list[Span]:
    """The stretches of time that runs can be written for, oldest first; one, unless a month is missing in
    between.

    `job_run` alone is asked: a month of attempts is made with its month of runs and retired after it.
    """
    with translated():
        rows = await conn.fetch(ATTACHED, "job_run")
    months = sorted(_read_bounds(row["bounds"]) for row in rows)
    spans: list[Span] = []
    for start, end in months:
        if spans and spans[-1].end == start:
            spans[-1] = Span(spans[-1].start, end)
        else:
            spans.append(Span(start, end))
    return spans


def _read_bounds(text: str) -> tuple[datetime, datetime]:
    found = PARTITION_BOUNDS.fullmatch(text)
    if found is None:
        raise StoreError(f"job_run has a partition that is not a stretch of time: {text}")
    start, end = (datetime.fromisoformat(bound) for bound in found.groups())
    return start, end


async def horizon(conn: Connection, *, now: datetime) -> datetime | None:
    """The end of the stretch that `now` lies in: from there on runs are refused. None when `now` itself is
    refused."""
    for span in await attached_range(conn):
        if now in span:
            return span.end
    return None
