"""Writing results in groups: one settler per process, one statement per verb and group.

A worker's slot stays taken until its settlement is acknowledged, so a slow database means back-pressure, never a
growing heap. While one group is written the next one gathers.

    written                 the worker goes on
    not returned            the lease was lost; discarded (after an unknown COMMIT the evidence tells which it was)
    refused by the database halved until the bad one is alone; that one is marked failed, the run row alone
    database unavailable    repeated until it answers: an answer in hand is offered as long as this process lives
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import NamedTuple

from app import metrics
from app.domain.run import Cancel, Complete, Defer, Fail, Reason, Release, Retry, Settled
from app.errors import StoreError, StoreUnavailable
from app.store import leases, settlements
from app.store.leases import Key, key_of
from app.store.pool import Connection, Pool, acquire

logger = logging.getLogger(__name__)

REPEAT_FIRST = 0.05
REPEAT_CAP = 1.0
"""Seconds between two tries of a group while the database is away: doubling from the first to the cap, jittered."""


async def _release(conn: Connection, items: Sequence[Settled]) -> set[Key]:
    return await leases.release(conn, [item.lease for item in items])


_Verb = Callable[[Connection, Sequence[Settled]], Awaitable[set[Key]]]

_VERBS: dict[type, _Verb] = {
    Complete: settlements.complete,
    Retry: settlements.retry,
    Fail: settlements.fail,
    Cancel: settlements.cancel,
    Defer: leases.defer,
    Release: _release,
}


class _Pending(NamedTuple):
    item: Settled
    written: asyncio.Future[bool]


class Settler:
    """`batch`: settlements per statement at most; `wait`: how long a lone one waits for company."""

    def __init__(self, pool: Pool, *, batch: int, wait: timedelta, rng: random.Random) -> None:
        self._pool = pool
        self._batch = batch
        self._wait = wait
        self._rng = rng
        self._queue: list[_Pending] = []
        self._arrived = asyncio.Event()
        self._is_finishing = False

    async def settle(self, item: Settled) -> bool:
        """True when it was written, False when the lease had been lost. A lease stands once in a group by construction:
        its one worker waits here."""
        pending = _Pending(item, asyncio.get_running_loop().create_future())
        self._queue.append(pending)
        self._arrived.set()
        return await pending.written

    async def run(self) -> None:
        """Write groups until `finish` is called and the queue is empty."""
        while True:
            await self._arrived.wait()
            if self._wait and len(self._queue) < self._batch and not self._is_finishing:
                await asyncio.sleep(self._wait.total_seconds())
            group, self._queue = self._queue[: self._batch], self._queue[self._batch :]
            if not self._queue:
                self._arrived.clear()
            await self._write(group)
            if self._is_finishing and not self._queue:
                return

    def finish(self) -> None:
        """No more settlements come; `run` returns once everything is written."""
        self._is_finishing = True
        self._arrived.set()

    async def _write(self, group: Sequence[_Pending]) -> None:
        by_verb: dict[type, list[_Pending]] = {}
        for pending in group:
            by_verb.setdefault(type(pending.item.settlement), []).append(pending)
        if group:
            metrics.SETTLE_BATCH_SIZE.observe(len(group))
        for settlement, members in by_verb.items():
            await self._write_alike(settlement, members)

    async def _write_alike(self, settlement: type, members: Sequence[_Pending]) -> None:
        """Write settlements of one kind in one statement, which is one transaction."""
        items = [pending.item for pending in members]
        pause = REPEAT_FIRST
        is_unsure = is_fault_repeated = False
        written: set[Key] = set()
        while True:
            try:
                async with acquire(self._pool) as conn:
                    written = await _VERBS[settlement](conn, items)
                    if is_unsure and len(written) < len(items):
                        missing = [item for item in items if key_of(item.lease) not in written]
                        written |= await settlements.written_before(conn, missing)
                break
            except StoreUnavailable as error:
                is_unsure = True
                logger.warning("settle.unavailable", extra={"runs": len(items), "error": str(error)})
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
                pause = min(2 * pause, REPEAT_CAP)
            except StoreError as error:
                await self._divide(settlement, members, error)
                return
            except Exception as error:
                # A fault of ours, and it must not stop the settler; but it may have passed, and an answer is in hand.
                if is_fault_repeated:
                    await self._divide(settlement, members, error)
                    return
                logger.exception("settle.fault", extra={"runs": len(items)})
                is_unsure = is_fault_repeated = True
        self._acknowledge(settlement, members, written)

    async def _divide(self, settlement: type, members: Sequence[_Pending], error: Exception) -> None:
        """A refused group: look for the bad row in halves; alone, it gets the minimal write."""
        if len(members) > 1:
            middle = len(members) // 2
            await self._write_alike(settlement, members[:middle])
            await self._write_alike(settlement, members[middle:])
            return
        pending = members[0]
        metrics.SETTLE_REFUSED.inc()
        reason = Reason.SETTLEMENT_REFUSED if isinstance(error, StoreError) else Reason.INTERNAL_ERROR
        logger.error(
            "settle.refused",
            extra={"run_id": str(pending.item.lease.ref.id), "error": str(error), "reason": reason.value},
        )
        is_marked = await self._mark_failed(pending.item, reason)
        self._acknowledge(Fail, members, {key_of(pending.item.lease)} if is_marked else ())

    async def _mark_failed(self, item: Settled, reason: Reason) -> bool:
        """The minimal write; refused as well, the run is left to the reaper."""
        pause = REPEAT_FIRST
        while True:
            try:
                async with acquire(self._pool) as conn:
                    return await settlements.mark_failed(conn, item, reason=reason)
            except StoreUnavailable:
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
                pause = min(2 * pause, REPEAT_CAP)
            except Exception:
                logger.exception("settle.mark_failed_refused", extra={"run_id": str(item.lease.ref.id)})
                return False

    def _acknowledge(self, settlement: type, members: Sequence[_Pending], written: Collection[Key]) -> None:
        kept = 0
        is_all = len(written) == len(members)
        for item, acknowledged in members:
            is_written = is_all or key_of(item.lease) in written
            if is_written:
                kept += 1
            else:
                metrics.LEASE_LOST.inc()
                logger.warning("settle.lease_lost", extra={"run_id": str(item.lease.ref.id)})
            if not acknowledged.done():
                acknowledged.set_result(is_written)
        metrics.SETTLED.labels(settlement=settlement.__name__.lower()).inc(kept)
