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
from app.claim.kafka.hint import encode
from app.claim.kafka.topic import HintTopic
from app.domain.run import RunRef
from app.errors import CarillonError

logger = logging.getLogger(__name__)

BATCH = 500
REST = timedelta(seconds=3)
"""After a failure: trying again at once would only make the next one."""


class Announcer:
    def __init__(self, topic: HintTopic, *, capacity: int, shards: int) -> None:
        self._topic = topic
        self._capacity = capacity
        self._shards = shards
        self._queue: deque[RunRef] = deque()
        self._arrived = asyncio.Event()
        self._is_ending = False

    def put(self, runs: Sequence[RunRef]) -> None:
        room = self._capacity - len(self._queue)
        self._queue.extend(runs[:room])
        if len(runs) > room:
            metrics.HINTS.labels("dropped").inc(len(runs) - max(room, 0))
        self._arrived.set()

    async def run(self) -> None:
        """Drain until `end` was called and the queue is empty, or the broker is away at the end."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                try:
                    await self._topic.send([encode(ref, shards=self._shards) for ref in batch])
                except CarillonError as error:
                    metrics.HINTS.labels("lost").inc(len(batch))
                    logger.warning("kafka.announce_failed", extra={"runs": len(batch), "error": str(error)})
                    if self._is_ending:
                        return
                    await asyncio.sleep(REST.total_seconds())
                else:
                    metrics.HINTS.labels("sent").inc(len(batch))
            if self._is_ending:
                return

    def end(self) -> None:
        self._is_ending = True
        self._arrived.set()
