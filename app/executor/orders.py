"""The orders of claimed runs: what to send where. Kept by (schedule, version), so an edit is seen at the next claim."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from app.domain.ids import RunId, ScheduleId
from app.domain.run import ClaimedRun
from app.store import orders
from app.store.orders import Order
from app.store.pool import Pool, acquire

KEPT = 20_000
"""Orders kept in memory; the least recently used go first."""


class OrderBook:
    """A cache in front of `store.orders`; what a claim lacks is read in one statement."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: OrderedDict[ScheduleId, Order] = OrderedDict()

    async def orders_of(self, runs: Sequence[ClaimedRun]) -> dict[ScheduleId, Order]:
        """The order of each run's schedule, at least as new as the version that its claim saw."""
        found: dict[ScheduleId, Order] = {}
        lacking: set[ScheduleId] = set()
        for run in runs:
            order = self._kept.get(run.schedule_id)
            if (
                order is not None
                and run.schedule_version is not None
                and order.version >= run.schedule_version
            ):
                self._kept.move_to_end(run.schedule_id)
                found[run.schedule_id] = order
            elif run.schedule_version is not None:
                lacking.add(run.schedule_id)
        if lacking:
            async with acquire(self._pool) as conn:
                for order in await orders.read_orders(conn, lacking):
                    found[order.schedule_id] = self._kept[order.schedule_id] = order
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    async def overlapping(self, runs: Sequence[ClaimedRun], found: dict[ScheduleId, Order]) -> set[RunId]:
        """Those of `runs` that their schedule's policy skips because an earlier run has not ended."""
        asked = [
            run
            for run in runs
            if (order := found.get(run.schedule_id)) is not None
            and order.skips_overlap
            and run.lease.attempt == 1
        ]
        if not asked:
            return set()
        async with acquire(self._pool) as conn:
            return await orders.overlapping(conn, asked)
