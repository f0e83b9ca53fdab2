"""From the topic to the buffer: one task that receives, reads, commits, and comes back from whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from app import metrics
from app.boottime import boottime
from app.claim.kafka.buffer import HintBuffer
from app.claim.kafka.hint import decode
from app.claim.kafka.topic import HintTopic, Message
from app.domain.run import RunRef
from app.errors import CarillonError, StoreError
from app.loops import Wake

logger = logging.getLogger(__name__)

RECEIVE_WITHIN = timedelta(milliseconds=250)
RECEIVE_BATCH = 1_000
TIDY_EVERY = 0.5
"""Seconds between two commits. A crash in between costs redelivered hints, which claim nothing."""
COMMIT_AGAIN_AFTER = 30.0
"""Seconds after which also positions that have not moved are committed: a broker may have lost them."""
LAST_COMMIT_WITHIN = timedelta(milliseconds=1500)
REST_FIRST = 1.0
REST_CAP = 5.0
"""Seconds between two tries while the broker is away."""
FARTHEST = timedelta(minutes=10)
"""No planner looks so far ahead (SCHEDULER_PLANNER_LOOKAHEAD is 5 minutes at most). A hint for then would hold its
partition's position until then."""


class Intake:
    """Fills `buffer` and rings `arrived`. `clock` is the database's; hints that are due for `keep` are given up."""

    def __init__(
        self,
        topic: HintTopic,
        buffer: HintBuffer,
        arrived: Wake,
        *,
        clock: Callable[[], Awaitable[datetime]],
        keep: timedelta,
    ) -> None:
        self._topic = topic
        self._buffer = buffer
        self._arrived = arrived
        self._clock = clock
        self._keep = keep
        self._round = 0
        self._tidy_at = 0.0
        self._committed: dict[int, int] = {}
        self._commit_all_at = 0.0

    async def run(self) -> None:
        """For ever, until cancelled."""
        rest = REST_FIRST
        while True:
            try:
                await self._turn()
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                logger.warning("kafka.cancelled_itself")  # as some of its calls do (aio-libs/aiokafka#647)
            except CarillonError as error:
                logger.warning("kafka.receive_failed", extra={"error": str(error), "rest_seconds": rest})
            except Exception:
                logger.exception("kafka.receive_fault")
            else:
                rest = REST_FIRST
                continue
            metrics.KAFKA_ERRORS.labels("receive").inc()
            self._committed.clear()
            await self._stop_receiving()
            await asyncio.sleep(rest)
            rest = min(2 * rest, REST_CAP)

    async def leave(self) -> None:
        """Commit what was used and leave the group. `run` has ended."""
        await self._commit(within=LAST_COMMIT_WITHIN)
        await self._stop_receiving()

    async def _turn(self) -> None:
        if self._buffer.is_full:
            self._topic.hold_back()
        else:
            self._topic.go_on()
        messages = await self._topic.receive(RECEIVE_BATCH, within=RECEIVE_WITHIN)
        if self._topic.round != self._round:
            self._round = self._topic.round
            self._buffer.forget_partitions()
            self._committed.clear()
        if messages:
            self._take_in(messages, horizon=await self._horizon())
            self._arrived.ring()
        if boottime() >= self._tidy_at:
            self._tidy_at = boottime() + TIDY_EVERY
            await self._drop_stale()
            await self._commit()
        metrics.KAFKA_PARTITIONS.set(len(self._topic.owned()))
        metrics.HINTS_WAITING.set(len(self._buffer))

    async def _stop_receiving(self) -> None:
        metrics.KAFKA_PARTITIONS.set(0)
        await self._topic.stop_receiving()

    def _take_in(self, messages: Sequence[Message], *, horizon: datetime | None) -> None:
        malformed: list[str] = []
        for message in messages:
            try:
                ref = _read(message, horizon=horizon)
            except ValueError as error:
                self._buffer.passed_over(message.partition, message.offset)
                malformed.append(
                    f"partition {message.partition}, offset {message.offset}: {str(error)[:200]}"
                )
            else:
                self._buffer.add(ref, partition=message.partition, offset=message.offset)
        metrics.HINTS.labels("received").inc(len(messages) - len(malformed))
        if malformed:
            metrics.HINTS.labels("malformed").inc(len(malformed))
            logger.warning("kafka.malformed", extra={"messages": len(malformed), "first": malformed[0]})

    async def _horizon(self) -> datetime | None:
        """None while the database is away: its hints wait for it anyway."""
        try:
            return await self._clock() + FARTHEST
        except StoreError:
            return None

    async def _drop_stale(self) -> None:
        if len(self._buffer):
            try:
                stale = self._buffer.drop_older(await self._clock() - self._keep)
            except StoreError:
                return
            metrics.HINTS.labels("stale").inc(stale)

    async def _commit(self, *, within: timedelta | None = None) -> None:
        """A failed commit is harmless: the repeated hints are refused by the claim."""
        if self._topic.round != self._round:
            return
        owned = self._topic.owned()
        if boottime() >= self._commit_all_at:
            self._committed.clear()
            self._commit_all_at = boottime() + COMMIT_AGAIN_AFTER
        moved = {
            number: at
            for number, at in self._buffer.committable().items()
            if number in owned and self._committed.get(number) != at
        }
        if not moved:
            return
        try:
            await self._topic.commit(moved, within=within)
        except CarillonError as error:
            metrics.KAFKA_ERRORS.labels("commit").inc()
            logger.warning("kafka.commit_failed", extra={"error": str(error)})
            self._committed.clear()
        else:
            self._committed |= moved


def _read(message: Message, *, horizon: datetime | None) -> RunRef:
    ref = decode(message.key, message.value)
    if horizon is not None and ref.fire_after > horizon:
        raise ValueError("a hint for a time that no planner has come to yet")
    return ref
