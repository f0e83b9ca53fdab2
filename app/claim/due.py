"""Claiming due runs: oldest first while everybody is served, in turns while there is backlog. Both modes stand on it.

    oldest first  one index scan behind a cursor, bounded by the room of the fullest tenant
        | a claim comes back full, or some tenant is at its cap
        v
    ring          due tenants are looked up every two seconds, those whose runs have just become due every 25 ms,
                  and dealt the idle slots in turns
        | nobody is left in the ring
        v
    oldest first

The cursor keeps claims from walking over what was claimed already (dead entries that a held snapshot keeps: 2,500
against 15,500 claims a second). What it leaves behind (retries, releases, expired leases, late commits) is found by
the sweep from the left end, paced by its own cost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from app import metrics
from app.boottime import boottime
from app.claim.grant import Grants
from app.claim.load import TenantLoad
from app.claim.ring import TenantRing
from app.domain.run import ClaimedRun, RunRef
from app.errors import StoreUnavailable
from app.store import claims, planning
from app.store.claims import LEFT_END, Cursor, Grant, Share
from app.store.pool import Connection, Pool, acquire

logger = logging.getLogger(__name__)

_Ask = Callable[[Connection, Grant], Awaitable[list[ClaimedRun]]]

DISCOVER_EVERY = 2.0
"""Seconds between two walks over all due tenants while the ring is in use. A thousand cost the database 10 to 30 ms."""
FRESH_EVERY = 0.025
FRESH_AT_MOST = 500
"""Seconds between two looks for tenants whose runs have become due since, and the runs looked at: a quiet tenant must
not wait for the next walk while another one has a backlog."""
RING_PAGE = 1_000
"""Tenants walked over per look; more of them are taken up in the following looks."""
SWEEP_AT_LEAST = 1.0
SWEEP_AT_MOST = 5.0
SWEEP_SHARE = 20
"""A sweep from the left end follows the last one by 20 × its duration, within these bounds in seconds. The upper one is
for a sweep that a stalled database made long: what lies behind the cursor must not wait for minutes after it."""
CLOCK_AGE = 10.0
"""Seconds after which the database's clock is looked at again."""
CLOCK_LOOKS = 3


class DueClaims:
    """Leases due runs for one process. `pool` must have been made with PLAN_GUARDS.

    Not re-entrant: one claim at a time, each inside `uncut`. `overdue_by` leaves out runs that are due for less.
    """

    def __init__(
        self,
        pool: Pool,
        grants: Grants,
        load: TenantLoad,
        *,
        rng: random.Random,
        overdue_by: timedelta = timedelta(),
    ) -> None:
        self._pool = pool
        self._grants = grants
        self._load = load
        self._overdue_by = overdue_by
        self._ring = TenantRing(rng)
        self._in_turns = False
        self._cursor = LEFT_END
        self._discovered_at = 0.0
        self._looked_at = 0.0
        self._looked_until: datetime | None = None
        self._sweep_at = 0.0
        self._unknown: set[str] = set()
        self._running: asyncio.Task[list[ClaimedRun]] | None = None
        self._clock: tuple[datetime, float] | None = None

    async def uncut(self, claiming: Coroutine[Any, Any, list[ClaimedRun]]) -> list[ClaimedRun]:
        """Run one claim to its end even when the caller is cancelled; what it leased then is given back.

        Cut in the middle, a statement would leave runs leased that nobody knows of.
        """
        task = asyncio.create_task(claiming)
        self._running = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._give_back)
            raise

    async def idle(self) -> None:
        """Wait for the claim that is under way, if one is."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def close(self) -> None:
        await self._resolve_unknown()

    async def claim(self, limit: int) -> list[ClaimedRun]:
        """At most `limit` due runs, within every tenant's cap; none when nothing is due or all are at their caps."""
        behind = self._cursor
        if boottime() >= self._sweep_at:
            behind = LEFT_END
            self._ring.rewind()
        if self._in_turns:
            await self._discover_if_time()
            # Tenants whose runs another replica took meanwhile cost a statement, never a pause: they leave the ring.
            while shares := self._ring.deal(limit, self._load):
                if runs := await self._claim_in_turns(shares):
                    return runs
            self._in_turns = len(self._ring) > 0
        within_cap = min(limit, self._load.least_room())
        if within_cap < 1:
            self._in_turns = True
        if self._in_turns:
            return []
        return await self._claim_oldest(within_cap, behind)

    async def claim_hinted(self, refs: Sequence[RunRef]) -> list[ClaimedRun]:
        """Those of `refs` that are due and free, whatever their age; the caller keeps to the caps."""
        return await self._lease("hint", lambda conn, grant: claims.claim_hinted(conn, grant, refs=refs))

    async def next_due_in(self) -> timedelta | None:
        """How long until the next planned run is due; None when there is none."""
        async with acquire(self._pool) as conn:
            return await claims.next_due_in(conn)

    async def database_time(self) -> datetime:
        """The database's now or a little before, by the best of its last looks: what is due by it, a claim finds due.

        Were it ahead, hints would be asked for too early, refused, and left to the sweep.
        """
        if self._clock is None or boottime() - self._clock[1] > CLOCK_AGE:
            async with acquire(self._pool) as conn:
                looks = [(await planning.database_now(conn), boottime()) for _ in range(CLOCK_LOOKS)]
            # Each is from before its answer came; the one that was under way for the least time is the latest.
            self._clock = max(looks, key=lambda look: look[0] - timedelta(seconds=look[1]))
        return self._clock[0] + timedelta(seconds=boottime() - self._clock[1])

    async def _claim_oldest(self, limit: int, behind: Cursor) -> list[ClaimedRun]:
        runs = await self._lease(
            "oldest",
            lambda conn, grant: claims.claim_due(
                conn, grant, limit=limit, behind=behind, overdue_by=self._overdue_by
            ),
        )
        if runs:
            last = runs[-1].lease.ref
            place = Cursor(last.fire_after, last.id)
            # A short claim has seen everything to its right: a sweep that found little does not set the cursor back.
            self._cursor = place if len(runs) == limit else max(self._cursor, place)
        if len(runs) == limit:
            self._in_turns = True
        return runs

    async def _claim_in_turns(self, shares: Sequence[Share]) -> list[ClaimedRun]:
        runs = await self._lease(
            "ring",
            lambda conn, grant: claims.claim_ring(conn, grant, shares=shares, overdue_by=self._overdue_by),
        )
        self._ring.served(shares, runs)
        return runs

    async def _discover_if_time(self) -> None:
        """Take up tenants with due runs; the walk goes on where it stopped, RING_PAGE tenants at a time."""
        now = boottime()
        if now - self._discovered_at >= (DISCOVER_EVERY if len(self._ring) else DISCOVER_EVERY / 10):
            self._discovered_at = now
            async with acquire(self._pool) as conn:
                page = await self._walk(conn, self._ring.discover_behind)
                if page.last is None and self._ring.discover_behind.int:
                    page = await self._walk(conn, UUID(int=0))
            self._ring.discover_behind = page.last or UUID(int=0)
        if now - self._looked_at >= FRESH_EVERY:
            since = self._looked_until if now - self._looked_at < DISCOVER_EVERY else None
            self._looked_at = now
            async with acquire(self._pool) as conn:
                fresh = await claims.newly_due(
                    conn, since=since, limit=FRESH_AT_MOST, overdue_by=self._overdue_by
                )
            self._looked_until = fresh.until
            self._ring.join_first(fresh.tenants)
            if fresh.is_cut:
                self._discovered_at = now - DISCOVER_EVERY  # there are more than were looked at: walk next

    async def _walk(self, conn: Connection, behind: UUID) -> claims.TenantPage:
        page = await claims.due_tenants(conn, behind=behind, limit=RING_PAGE, overdue_by=self._overdue_by)
        self._ring.join(page.due)
        return page

    async def _lease(self, source: str, ask: _Ask) -> list[ClaimedRun]:
        """One claim statement under a new token. Its outcome unknown, the token is given back before the next one."""
        await self._resolve_unknown()
        grant = self._grants.new()
        started = boottime()
        try:
            async with acquire(self._pool) as conn:
                self._unknown.add(grant.token)
                runs = await ask(conn, grant)
        except StoreUnavailable:
            logger.warning("claim.unknown", extra={"token": grant.token})
            raise
        self._unknown.discard(grant.token)
        if started >= self._sweep_at:
            pause = SWEEP_SHARE * (boottime() - started)
            self._sweep_at = boottime() + min(max(SWEEP_AT_LEAST, pause), SWEEP_AT_MOST)
        metrics.CLAIMS.labels(source=source).inc()
        metrics.CLAIMED_RUNS.inc(len(runs))
        return runs

    async def _resolve_unknown(self) -> None:
        for token in sorted(self._unknown):
            async with acquire(self._pool) as conn:
                given_back = await claims.release_by_token(conn, token)
            self._unknown.discard(token)
            logger.info("claim.given_back", extra={"token": token, "runs": given_back})

    def _give_back(self, task: asyncio.Task[list[ClaimedRun]]) -> None:
        """A cancelled claim that succeeded after all: its token is given back before the next claim, or at close."""
        if not task.cancelled() and task.exception() is None:
            self._unknown |= {run.lease.token for run in task.result()}
