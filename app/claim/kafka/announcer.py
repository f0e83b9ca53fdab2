"""From the planner's commit to the topic: a bounded queue and one task that drains it.

`put` returns at once whatever the broker does. Full, it drops the newest and counts: the sweep finds those runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from app import metrics
from app.boottime import boottime
from app.claim.kafka.hint import encode
from app.claim.kafka.topic import HintTopic
from app.domain.run import RunRef
from app.errors import CarillonError
from app.loops import sleep_or_stop

logger = logging.getLogger(__name__)

BATCH = 500
REST = timedelta(seconds=3)
"""After a failure: trying again at once would only make the next one."""


class Announcer:
    """Holds at most `capacity` hints, none for longer than `keep`: after that the sweep has had its run."""

    def __init__(self, topic: HintTopic, *, capacity: int, shards: int, keep: timedelta) -> None:
        self._topic = topic
        self._capacity = capacity
        self._shards = shards
        self._keep = keep
        self._queue: deque[tuple[float, RunRef]] = deque()
        self._arrived = asyncio.Event()
        self._ending = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, runs: Sequence[RunRef]) -> None:
        """Have these runs told of. Returns at once."""
        now = boottime()
        room = max(0, self._capacity - len(self._queue))
        self._queue.extend((now, ref) for ref in runs[:room])
        metrics.HINTS.labels("dropped").inc(len(runs[room:]))
        self._arrived.set()

    async def run(self) -> None:
        """Drain until `end` was called and the queue is empty, or the broker does not take it at the end."""
        while True:
            if batch := self._next_batch():
                if not await self._send(batch) and await sleep_or_stop(REST, self._ending):
                    return
            elif self._ending.is_set():
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def end(self) -> None:
        """Nothing is put from here on."""
        self._ending.set()
        self._arrived.set()

    def _next_batch(self) -> list[RunRef]:
        too_old = boottime() - self._keep.total_seconds()
        lost = 0
        while self._queue and self._queue[0][0] < too_old:
            self._queue.popleft()
            lost += 1
        metrics.HINTS.labels("lost").inc(lost)
        return [self._queue.popleft()[1] for _ in range(min(BATCH, len(self._queue)))]

    async def _send(self, batch: Sequence[RunRef]) -> bool:
        """Whether the broker has them. Whatever goes wrong costs this batch, never the task."""
        try:
            await self._topic.send([encode(ref, shards=self._shards) for ref in batch])
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            logger.warning("kafka.announce_failed", extra={"runs": len(batch), "error": "cancelled itself"})
        except CarillonError as error:
            logger.warning("kafka.announce_failed", extra={"runs": len(batch), "error": str(error)})
        except Exception:
            logger.exception("kafka.announce_fault", extra={"runs": len(batch)})
        else:
            metrics.HINTS.labels("sent").inc(len(batch))
            return True
        metrics.HINTS.labels("lost").inc(len(batch))
        return False
