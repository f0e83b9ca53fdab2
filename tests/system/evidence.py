"""What the database and the receiver's ledger say about a finished burst, and whether the two agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from app.local.ledger import LedgerLine, Received
from app.store.pool import Connection, close, connect
from tests.eventually import eventually

ALL_END_WITHIN = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One evidence row."""

    delivery_id: str
    number: int
    outcome: str
    is_maybe_delivered: bool
    worker: str


async def all_ended(conn: Connection, *, runs: int, within: timedelta = ALL_END_WITHIN) -> None:
    """Wait until there are `runs` runs and every one has ended."""

    async def probe() -> bool:
        if await conn.fetchval("SELECT 1 FROM job_run WHERE status IN ('pending', 'retrying') LIMIT 1"):
            return False
        return bool(await conn.fetchval("SELECT count(*) FROM job_run") >= runs)

    await eventually(probe, within=within)


async def statuses(conn: Connection) -> dict[str, int]:
    """How many runs are in each stored status."""
    rows = await conn.fetch("SELECT status, count(*) FROM job_run GROUP BY status")
    return {row[0]: row[1] for row in rows}


async def attempts(conn: Connection) -> list[Attempt]:
    """All evidence, first attempts first."""
    rows = await conn.fetch(
        """SELECT r.idempotency_key::text, a.attempt, a.outcome, a.maybe_delivered, a.worker
             FROM run_attempt AS a
             JOIN job_run AS r ON r.id = a.run_id AND r.scheduled_for = a.scheduled_for
            ORDER BY a.attempt"""
    )
    return [Attempt(*row) for row in rows]


async def delivery_ids(conn: Connection) -> set[str]:
    """Of all runs."""
    rows = await conn.fetch("SELECT idempotency_key::text FROM job_run")
    return {row[0] for row in rows}


async def busiest(conn: Connection) -> dict[str, int]:
    """The most attempts that each worker had under way at one instant, by their evidence."""
    rows = await conn.fetch(
        """SELECT worker, max(under_way)
             FROM (SELECT worker, sum(step) OVER (PARTITION BY worker ORDER BY at, step) AS under_way
                     FROM run_attempt CROSS JOIN LATERAL (VALUES (started_at, 1), (finished_at, -1)) AS edge(at, step)
                    WHERE started_at IS NOT NULL) AS walk
            GROUP BY worker"""
    )
    return {row[0]: row[1] for row in rows}


@asynccontextmanager
async def watched_leases(dsn: str) -> AsyncIterator[Counter[str]]:
    """The most leases that each replica was seen to hold at once, looked at again and again for the whole block."""
    peaks: Counter[str] = Counter()
    conn = await connect(dsn, application_name="carillon tests, lease watch")

    async def look() -> None:
        while True:
            rows = await conn.fetch(
                """SELECT split_part(claimed_by, '/', 1), count(*) FROM job_run
                    WHERE status IN ('pending', 'retrying') AND claimed_by IS NOT NULL GROUP BY 1"""
            )
            for replica, held in rows:
                peaks[replica] = max(peaks[replica], held)
            await asyncio.sleep(0.02)  # a rhythm, not a synchronisation: every look is a sample

    looking = asyncio.create_task(look())
    try:
        yield peaks
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await close(conn)


def repeated(ledger: Iterable[Received | LedgerLine]) -> set[str]:
    """The delivery ids that arrived more than once."""
    return {id_ for id_, count in arrivals(ledger).items() if count > 1}


def arrivals(ledger: Iterable[Received | LedgerLine]) -> Counter[str]:
    """How often each delivery id arrived."""
    return Counter(received.delivery_id or "" for received in ledger)


def same_number_twice(ledger: Iterable[Received | LedgerLine]) -> set[tuple[str, int]]:
    """Attempts whose very number arrived more than once."""
    seen = Counter((received.delivery_id or "", received.attempt or 0) for received in ledger)
    return {attempt for attempt, count in seen.items() if count > 1}


def with_outcome(found: Iterable[Attempt], *outcomes: str) -> set[str]:
    """The delivery ids that have an attempt with one of these outcomes."""
    return {attempt.delivery_id for attempt in found if attempt.outcome in outcomes}


async def all_ended_but(conn: Connection, open_runs: int) -> None:
    """Wait until no more than so many runs are open."""

    async def probe() -> bool:
        left = await conn.fetchval("SELECT count(*) FROM job_run WHERE status IN ('pending', 'retrying')")
        return bool(left <= open_runs)

    await eventually(probe, within=ALL_END_WITHIN)
