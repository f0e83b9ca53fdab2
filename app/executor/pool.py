"""The worker pool of one replica: claims no more than it can start, starts it, drains.

A slot is taken when a claim returns and given back when the run's settlement is acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

from app import metrics
from app.claim.load import TenantLoad
from app.claim.strategy import ClaimStrategy
from app.domain.admit import admit
from app.domain.run import Cancel, ClaimedRun, Fail, Reason, Release, Settled, Settlement
from app.errors import StoreError
from app.executor.attempt import Desk, attempt_run
from app.executor.orders import OrderBook
from app.store.orders import Order

logger = logging.getLogger(__name__)

FULL_WAIT = timedelta(seconds=1)
"""How long a turn waits for a slot at most; the next turn goes on waiting."""
GATHER = timedelta(milliseconds=5)
"""How long a turn waits for more slots than the few that are free: claims of one run cost as much as claims of many."""


class Executor:
    """`batch` runs per claim at most; the slots are those of `load`."""

    def __init__(
        self, *, claims: ClaimStrategy, book: OrderBook, desk: Desk, load: TenantLoad, batch: int
    ) -> None:
        self._claims = claims
        self._book = book
        self._desk = desk
        self._load = load
        self._batch = batch
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        metrics.IN_FLIGHT.set_function(lambda: load.in_flight)

    async def claim_and_start(self) -> timedelta | None:
        """One turn: wait for idle slots, claim at most so many runs, start them. Never waits for their ends."""
        idle = await self._idle_slots()
        if idle == 0 or self._stop.is_set():
            return timedelta()
        runs = await self._claims.claim(min(idle, self._batch))
        for run in runs:
            self._load.take(run.lease.ref.tenant_id)
        if runs:
            self._spawn(self._start(runs))
        return timedelta()

    def stop_taking(self) -> None:
        """From here on nothing new is started; what a claim still returns is given back."""
        self._stop.set()

    def hurry(self) -> None:
        """Do not wait for the grace any longer."""
        self._hurry.set()

    async def drain(self, *, grace: timedelta, settle_within: timedelta) -> int:
        """Let what is in flight finish within `grace`, then abandon it; how many runs are left unsettled at the end.

        A run whose request never left is released; one whose request may have left is settled as a retry, its attempt
        spent, because giving the attempt back would send the same number twice.
        """
        self.stop_taking()
        if not await self._finished_within(grace, unless=self._hurry):
            logger.warning("drain.abandoning", extra={"in_flight": self._load.in_flight})
            self._desk.keeper.abandon_all()
            await self._finished_within(settle_within, unless=asyncio.Event())
        for task in list(self._tasks):
            task.cancel()
        return self._load.in_flight

    async def _finished_within(self, span: timedelta, *, unless: asyncio.Event) -> bool:
        """Wait for all tasks, and those that they start, until the time is over or `unless` is set."""
        called_off = asyncio.create_task(unless.wait())
        try:
            async with asyncio.timeout(span.total_seconds()):
                while self._tasks and not unless.is_set():
                    await asyncio.wait({*self._tasks, called_off}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return not self._tasks
        finally:
            called_off.cancel()
        return not self._tasks

    async def _idle_slots(self) -> int:
        want = min(self._batch, max(1, self._load.slots // 4))
        if self._load.idle == 0:
            await self._load.slot_freed(at_most=FULL_WAIT, stop=self._stop)
        if 0 < self._load.idle < want:
            await self._load.slot_freed(at_most=GATHER, stop=self._stop)
        return self._load.idle

    async def _start(self, runs: Sequence[ClaimedRun]) -> None:
        """Read what the runs need in one go, then give each its own task."""
        try:
            orders = await self._book.orders_of(runs)
            overlapping = await self._book.overlapping(runs, orders)
        except Exception as error:
            # Whatever it is, the slots come back and the runs go back unsent: they are due again at the next sweep.
            if isinstance(error, StoreError):
                logger.warning("orders.unavailable", extra={"runs": len(runs), "error": str(error)})
            else:
                logger.exception("orders.fault", extra={"runs": len(runs)})
            for run in runs:
                self._spawn(self._end_unsent(run, Release()))
            return
        for run in runs:
            if self._stop.is_set():
                self._spawn(self._end_unsent(run, Release()))
            elif run.lease.ref.id in overlapping:
                self._spawn(self._end_unsent(run, admit(run) or Cancel(Reason.OVERLAP)))
            else:
                self._spawn(self._work(run, orders.get(run.schedule_id)))

    async def _work(self, run: ClaimedRun, order: Order | None) -> None:
        try:
            await attempt_run(run, order, self._desk)
        except Exception:
            # The edge of one attempt: a fault of ours must not take the pool, or leave the run to its lease's end.
            logger.exception("attempt.fault", extra={"run_id": str(run.lease.ref.id)})
            await self._desk.settler.settle(Settled(run.lease, Fail(Reason.INTERNAL_ERROR), None))
        finally:
            self._give_slot(run)

    async def _end_unsent(self, run: ClaimedRun, settlement: Settlement) -> None:
        try:
            with self._desk.keeper.hold(run):
                await self._desk.settler.settle(Settled(run.lease, settlement, None))
        finally:
            self._give_slot(run)

    def _give_slot(self, run: ClaimedRun) -> None:
        self._load.give(run.lease.ref.tenant_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
