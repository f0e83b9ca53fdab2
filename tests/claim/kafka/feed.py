"""A topic without a broker: what is on it, and what goes wrong with it, is the test's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from app.claim.kafka.hint import encode
from app.claim.kafka.topic import HintTopic, Message
from app.domain.run import RunRef
from app.settings import KafkaSettings


class Feed(HintTopic):
    """Delivers what was `put`; `answers` are raised by the next receives, in turn."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings(bootstrap="127.0.0.1:9"), client_id="tests")
        self.partitions = {0, 1, 2}
        self.ends: dict[int, int] = {}
        self.waiting: deque[Message] = deque()
        self.answers: list[BaseException] = []
        self.commit_answers: list[BaseException] = []
        self.open_answer: BaseException | None = None
        self.committed: dict[int, int] = {}
        self.commits: list[dict[int, int]] = []
        self.sent: list[tuple[bytes, bytes]] = []
        self.calls: list[str] = []
        self.is_held_back = False
        self.rounds = 1
        self._arrived = asyncio.Event()

    def put(self, *refs: RunRef, partition: int = 0) -> None:
        for ref in refs:
            self.put_raw(*encode(ref, shards=1), partition=partition)

    def put_raw(self, key: bytes | None, value: bytes | None, *, partition: int = 0) -> None:
        offset = self.ends.get(partition, 0)
        self.ends[partition] = offset + 1
        self.waiting.append(Message(partition, offset, key, value))
        self._arrived.set()

    def count(self, call: str) -> int:
        return self.calls.count(call)

    async def open_producer(self) -> Any:
        self.calls.append("open")
        if self.open_answer is not None:
            raise self.open_answer

    async def send(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        self.sent += messages

    async def receive(self, limit: int, *, within: timedelta) -> list[Message]:
        self.calls.append("receive")
        if self.answers:
            raise self.answers.pop(0)
        if not self.waiting or self.is_held_back:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await self._arrived.wait()
        if self.is_held_back:
            return []
        return [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]

    @property
    def round(self) -> int:
        return self.rounds

    def hold_back(self) -> None:
        self.is_held_back = True

    def go_on(self) -> None:
        self.is_held_back = False

    def owned(self) -> set[int]:
        return set(self.partitions)

    async def commit(self, positions: Mapping[int, int], *, within: timedelta | None = None) -> None:
        self.calls.append("commit")
        if self.commit_answers:
            raise self.commit_answers.pop(0)
        self.commits.append(dict(positions))
        self.committed |= positions

    async def stop_receiving(self) -> None:
        self.calls.append("stop")

    async def close(self) -> None:
        self.calls.append("close")
