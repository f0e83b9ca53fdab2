"""The claim strategy of `SCHEDULER_CLAIM_MODE=kafka`: hints say where to look, the same claim statement decides.

Two sources, and the second is reserved, not a leftover:

    hints   received by a task of their own, held until due, claimed by id in turns of their tenants
    sweep   every 500 ms, whatever hints wait, at least a quarter of the slots, and of every four runs one as long as it
            finds more, through the ring of due tenants, for runs overdue by the grace: lost hints, retries, defers,
            releases, expired leases, a dead broker, and the moment of switching modes with mixed replicas

Offsets are committed once the leases are in PostgreSQL, up to the oldest hint that still waits, never after delivery:
slow targets block no partition, and a redelivered hint claims nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from datetime import timedelta

from app import metrics
from app.boottime import boottime
from app.claim.due import DueClaims
from app.claim.kafka.announcer import Announcer
from app.claim.kafka.buffer import HintBuffer
from app.claim.kafka.calls import TopicUnavailable
from app.claim.kafka.intake import Intake
from app.claim.kafka.topic import HintTopic
from app.claim.load import TenantLoad
from app.domain.run import ClaimedRun, RunRef
from app.loops import Wake
from app.settings import KafkaSettings

logger = logging.getLogger(__name__)

STALE_AFTER = 10
"""Hints older than so many times the grace are dropped unasked: the sweep has had them."""
SWEEP_SHARE = 4
"""One slot in four is the sweep's, and one run in four while it finds more than it may take: where every slot is busy,
a claim is for the few that have just come free, and a turn now and then would be next to nothing."""
WAIT_AT_MOST = 0.5
ANNOUNCE_WITHIN = 1.0
"""Seconds for telling of the last planned runs when the replica stops."""


class KafkaClaims:
    """`due` claims with `overdue_by` = the grace; it is also what claims the hinted runs.

    Receives from the first `claim` on: a replica that claims nothing (its role is another) must not be given hints.
    """

    def __init__(self, due: DueClaims, topic: HintTopic, load: TenantLoad, settings: KafkaSettings) -> None:
        self._due = due
        self._topic = topic
        self._load = load
        self._settings = settings
        keep = STALE_AFTER * settings.grace
        self._buffer = HintBuffer(settings.buffer)
        self._arrived = Wake()
        self._intake = Intake(topic, self._buffer, self._arrived, clock=due.database_time, keep=keep)
        self._announcer = Announcer(topic, capacity=settings.queue, shards=settings.shards, keep=keep)
        self._announcing: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._sweep_at = 0.0
        self._is_behind = False
        self._hinted_meanwhile = 0

    async def open(self) -> None:
        """Make the topic and find out whether the broker can do what is asked of it. Raises ConfigError."""
        try:
            await self._topic.open_producer()
        except TopicUnavailable as error:
            logger.warning("kafka.unavailable", extra={"error": str(error)})
        self._announcing = asyncio.create_task(self._announcer.run(), name="hints out")

    async def announce(self, runs: Sequence[RunRef]) -> None:
        self._announcer.put(runs)

    async def claim(self, limit: int) -> list[ClaimedRun]:
        if self._left.is_set() or limit < 1:
            return []
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._intake.run(), name="hints in")
        return await self._due.uncut(self._claim(limit))

    async def leave(self) -> None:
        """Leave the group after a last commit: what still waits is received again by the next owner."""
        self._left.set()
        if self._receiving is not None:
            await _ended(self._receiving)
        await self._due.idle()
        await self._intake.leave()

    async def close(self) -> None:
        await self._due.close()
        self._announcer.end()
        if self._announcing is not None:
            await asyncio.wait([self._announcing], timeout=ANNOUNCE_WITHIN)
            await _ended(self._announcing)
        await self._topic.close()

    async def _claim(self, limit: int) -> list[ClaimedRun]:
        """Sweep when it is time, hints otherwise; at most `WAIT_AT_MOST` of waiting for either."""
        give_up_at = boottime() + WAIT_AT_MOST
        while not self._left.is_set():
            if self._is_sweeps_turn() and (runs := await self._sweep(limit)):
                return runs
            if runs := await self._claim_hints(limit):
                return runs
            if (left := give_up_at - boottime()) <= 0:
                break
            await self._wait(left)
        return []

    def _is_sweeps_turn(self) -> bool:
        return self._hinted_meanwhile >= SWEEP_SHARE - 1 or boottime() >= self._sweep_at

    async def _sweep(self, limit: int) -> list[ClaimedRun]:
        reserved = min(limit, max(1, self._load.slots // SWEEP_SHARE))
        runs = await self._due.claim(reserved)
        self._is_behind = len(runs) == reserved
        paid = self._hinted_meanwhile - (SWEEP_SHARE - 1) * len(runs)
        self._hinted_meanwhile = max(paid, 0) if self._is_behind else 0
        # A full sweep with no hint to claim is followed by the next at once: nobody else needs the slots.
        now = await self._due.database_time()
        is_alone = self._is_behind and not self._buffer.has_ripe(now, self._load)
        self._sweep_at = boottime() + (0 if is_alone else self._settings.sweep_interval.total_seconds())
        return runs

    async def _claim_hints(self, limit: int) -> list[ClaimedRun]:
        refs = self._buffer.take(await self._due.database_time(), limit, self._load)
        if not refs:
            return []
        try:
            runs = await self._due.claim_hinted(refs)
        except BaseException:
            self._buffer.put_back(refs)
            raise
        self._buffer.used(refs)
        if self._is_behind:
            self._hinted_meanwhile += len(runs)
        metrics.HINTS.labels("claimed").inc(len(runs))
        metrics.HINTS.labels("refused").inc(len(refs) - len(runs))
        return runs

    async def _wait(self, at_most: float) -> None:
        """Until a hint arrives or ripens, the sweep is due, a tenant comes off its cap, or the time is over."""
        until_sweep = max(self._sweep_at - boottime(), 0.001)
        wait = min(at_most, until_sweep)
        next_due_at = self._buffer.next_due_at()
        if next_due_at is not None:
            until_due = (next_due_at - await self._due.database_time()).total_seconds()
            wait = min(wait, max(until_due, 0.001))
        span = timedelta(seconds=wait)
        await _first(
            self._arrived.wait(span, stop=self._left), self._load.room_again(at_most=span, stop=self._left)
        )


async def _first(*waits: Awaitable[None]) -> None:
    """Wait for the first of them; what rings for the others is remembered there."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
