"""The claim strategy of `SCHEDULER_CLAIM_MODE=postgres`: the rows are the queue, and nobody needs to be told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from app.claim.due import DueClaims
from app.claim.load import TenantLoad
from app.domain.run import ClaimedRun, RunRef


@dataclass(frozen=True, slots=True)
class Pace:
    """How long an idle claim waits: until the next planned run, `poll` at the most."""

    poll: timedelta = timedelta(milliseconds=200)
    least: timedelta = timedelta(milliseconds=1)


class PostgresClaims:
    """Claims what is due, and waits a moment when nothing is."""

    def __init__(self, due: DueClaims, load: TenantLoad, *, pace: Pace | None = None) -> None:
        self._due = due
        self._load = load
        self._pace = pace or Pace()
        self._left = asyncio.Event()

    async def open(self) -> None:
        """Nothing to get ready."""

    async def announce(self, runs: Sequence[RunRef]) -> None:
        """Nothing to tell."""

    async def claim(self, limit: int) -> list[ClaimedRun]:
        if self._left.is_set() or limit < 1:
            return []
        return await self._due.uncut(self._claim(limit))

    async def leave(self) -> None:
        self._left.set()
        await self._due.idle()

    async def close(self) -> None:
        await self._due.close()

    async def _claim(self, limit: int) -> list[ClaimedRun]:
        runs = await self._due.claim(limit)
        if not runs and not self._left.is_set() and await self._pause():
            runs = await self._due.claim(limit)
        return runs

    async def _pause(self) -> bool:
        """Wait until something may be due, or a tenant at its cap has room again; False when we are leaving."""
        due_in = await self._due.next_due_in()
        wait = self._pace.poll if due_in is None else min(max(due_in, self._pace.least), self._pace.poll)
        await self._load.room_again(at_most=wait, stop=self._left)
        return not self._left.is_set()
