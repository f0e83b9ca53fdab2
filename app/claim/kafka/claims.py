"""The claim strategy of `SCHEDULER_CLAIM_MODE=kafka`: hints say where to look, the same claim statement decides.

Two sources, and the second is reserved, not a leftover:

    hints   received by a task of their own, held until due, claimed by id in turns of their tenants
    sweep   every 500 ms, whatever hints wait, at least a quarter of the slots through the ring of due tenants, for runs
            overdue by the grace: lost hints, retries, defers, releases, expired leases, a dead broker, and the moment
            of switching modes with mixed replicas

Offsets are committed once the leases are in PostgreSQL, up to the oldest hint that still waits, never after delivery:
slow targets block no partition, and a redelivered hint claims nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

from app import metrics
from app.boottime import boottime
from app.claim.due import DueClaims
from app.claim.kafka.announcer import Announcer
from app.claim.kafka.buffer import Held, HintBuffer
from app.claim.kafka.hint import decode
from app.claim.kafka.topic import HintTopic, Message, TopicUnavailable
from app.claim.load import TenantLoad
from app.domain.run import ClaimedRun, RunRef
from app.errors import CarillonError, ConfigError, StoreError
from app.loops import Wake
from app.settings import KafkaSettings

logger = logging.getLogger(__name__)

RECEIVE_WITHIN = timedelta(milliseconds=250)
RECEIVE_BATCH = 1_000
COMMIT_EVERY = 0.5
"""Seconds between two commits. A crash in between costs redelivered hints, which claim nothing."""
REST_FIRST = 1.0
REST_CAP = 5.0
"""Seconds between two tries while the broker is away."""
STALE_AFTER = 10
"""Hints older than so many times the grace are dropped unasked: the sweep has had them."""
SWEEP_SHARE = 4
"""One slot in four is the sweep's."""
WAIT_AT_MOST = timedelta(milliseconds=500)


class KafkaClaims:
    """`due` claims with `overdue_by` = the grace; it is also what claims the hinted runs."""

    def __init__(self, due: DueClaims, topic: HintTopic, load: TenantLoad, settings: KafkaSettings) -> None:
        self._due = due
        self._topic = topic
        self._load = load
        self._settings = settings
        self._buffer = HintBuffer(settings.buffer)
        self._announcer = Announcer(topic, capacity=settings.queue, shards=settings.shards)
        self._arrived = Wake()
        self._left = asyncio.Event()
        self._sweep_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        try:
            await self._topic.ensure()
        except TopicUnavailable as error:
            logger.warning("kafka.unavailable", extra={"error": str(error)})
        self._tasks = [
            asyncio.create_task(self._receive_for_ever(), name="hints in"),
            asyncio.create_task(self._announcer.run(), name="hints out"),
        ]

    async def announce(self, runs: Sequence[RunRef]) -> None:
        self._announcer.put(runs)

    async def claim(self, limit: int) -> list[ClaimedRun]:
        if self._left.is_set() or limit < 1:
            return []
        return await self._due.uncut(self._claim(limit))

    async def leave(self) -> None:
        """Leave the group after a last commit: what still waits is received again by the next owner."""
        self._left.set()
        receiving = self._tasks[:1]
        for task in receiving:
            task.cancel()
        if receiving:
            await asyncio.wait(receiving)
        await self._due.idle()
        await self._commit()
        await self._topic.stop_receiving()

    async def close(self) -> None:
        self._announcer.end()
        if len(self._tasks) > 1:
            await asyncio.wait(self._tasks[1:], timeout=WAIT_AT_MOST.total_seconds() * 2)
            self._tasks[1].cancel()
        await self._topic.close()
        await self._due.close()

    async def _claim(self, limit: int) -> list[ClaimedRun]:
        """Sweep when it is time, hints otherwise; at most `WAIT_AT_MOST` of waiting for either."""
        give_up_at = boottime() + WAIT_AT_MOST.total_seconds()
        while not self._left.is_set():
            if boottime() >= self._sweep_at and (runs := await self._sweep(limit)):
                return runs
            if runs := await self._claim_hints(limit):
                return runs
            if (left := give_up_at - boottime()) <= 0:
                break
            await self._wait(left)
        return []

    async def _sweep(self, limit: int) -> list[ClaimedRun]:
        reserved = min(limit, max(1, self._load.slots // SWEEP_SHARE))
        runs = await self._due.claim(reserved)
        # A full sweep with no hint to claim is followed by the next at once: nobody else needs the slots.
        is_more = len(runs) == reserved and not self._buffer.has_ripe(self._load)
        self._sweep_at = boottime() + (0 if is_more else self._settings.sweep_interval.total_seconds())
        return runs

    async def _claim_hints(self, limit: int) -> list[ClaimedRun]:
        now = await self._due.database_time()
        metrics.HINTS.labels("stale").inc(self._buffer.drop_older(now - STALE_AFTER * self._settings.grace))
        hints = self._buffer.take(now, limit, self._load)
        if not hints:
            return []
        try:
            runs = await self._due.claim_hinted([held.ref for held in hints])
        except StoreError:
            self._buffer.put_back(hints)
            raise
        self._buffer.used(hints)
        metrics.HINTS.labels("claimed").inc(len(runs))
        metrics.HINTS.labels("refused").inc(len(hints) - len(runs))
        return runs

    async def _wait(self, at_most: float) -> None:
        """Until a hint arrives or ripens, the sweep is due, a capped tenant has room, or the time is over."""
        until_sweep = max(self._sweep_at - boottime(), 0.001)
        wait = min(at_most, until_sweep)
        next_due_at = self._buffer.next_due_at()
        if next_due_at is not None:
            until_due = (next_due_at - await self._due.database_time()).total_seconds()
            wait = min(wait, max(until_due, 0.001))
        await self._arrived.wait(timedelta(seconds=wait), stop=self._left)

    async def _receive_for_ever(self) -> None:
        rest = REST_FIRST
        committed_at = 0.0
        while True:
            try:
                await self._receive()
                if boottime() - committed_at >= COMMIT_EVERY:
                    committed_at = boottime()
                    await self._commit()
                rest = REST_FIRST
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                logger.warning("kafka.cancelled_itself")
            except CarillonError as error:
                logger.warning("kafka.receive_failed", extra={"error": str(error), "rest_seconds": rest})
                metrics.KAFKA_ERRORS.labels("receive").inc()
                await self._topic.stop_receiving()
                await asyncio.sleep(rest)
                rest = min(2 * rest, REST_CAP)
            except Exception:
                logger.exception("kafka.receive_fault")
                metrics.KAFKA_ERRORS.labels("receive").inc()
                await self._topic.stop_receiving()
                await asyncio.sleep(rest)
                rest = min(2 * rest, REST_CAP)

    async def _receive(self) -> None:
        if self._buffer.is_full:
            self._topic.hold_back()
        else:
            self._topic.go_on()
        messages = await self._topic.receive(RECEIVE_BATCH, within=RECEIVE_WITHIN)
        for message in messages:
            self._take_in(message)
        if messages:
            self._arrived.ring()
        metrics.HINTS_WAITING.set(len(self._buffer))

    def _take_in(self, message: Message) -> None:
        try:
            ref = decode(message.key, message.value)
        except (ValueError, RecursionError) as error:
            metrics.HINTS.labels("malformed").inc()
            logger.warning(
                "kafka.malformed",
                extra={"partition": message.partition, "offset": message.offset, "error": str(error)[:200]},
            )
            self._buffer.passed_over(message.partition, message.offset)
            return
        metrics.HINTS.labels("received").inc()
        self._buffer.add(Held(message.partition, message.offset, ref))

    async def _commit(self) -> None:
        """A failed commit is harmless: the repeated hints are refused by the claim."""
        positions = self._buffer.committable()
        owned = self._topic.owned()
        self._buffer.forget(positions.keys() - owned)
        try:
            await self._topic.commit({number: at for number, at in positions.items() if number in owned})
        except (TopicUnavailable, ConfigError) as error:
            metrics.KAFKA_ERRORS.labels("commit").inc()
            logger.warning("kafka.commit_failed", extra={"error": str(error)})
