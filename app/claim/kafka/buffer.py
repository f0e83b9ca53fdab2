"""Hints that were received and not yet used: the early ones wait for their time, the due ones for their tenant's turn.

A hint stays uncommitted until it was used, so that the next owner of its partition gets it again in time: committed
early, a clean deploy made 300 of 300 hints nine seconds late. When the buffer is full, partitions are paused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import count

from app.claim.load import TenantLoad
from app.domain.ids import TenantId
from app.domain.run import RunRef


@dataclass(frozen=True, slots=True)
class Held:
    """One hint and where it came from; `offset` is its message's."""

    partition: int
    offset: int
    ref: RunRef


class HintBuffer:
    """At most about `capacity` hints. One process, one event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._early: list[tuple[datetime, int, Held]] = []
        self._order = count()
        self._due: dict[TenantId, deque[Held]] = {}
        self._turns: deque[TenantId] = deque()
        self._partitions: dict[int, _Progress] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def is_full(self) -> bool:
        return self._size >= self._capacity

    def add(self, held: Held) -> None:
        self._progress(held.partition).received(held.offset)
        self._size += 1
        heapq.heappush(self._early, (held.ref.fire_after, next(self._order), held))

    def passed_over(self, partition: int, offset: int) -> None:
        """A message that is no hint of ours: nothing to wait for."""
        self._progress(partition).seen(offset)

    def take(self, now: datetime, limit: int, load: TenantLoad) -> list[Held]:
        """At most `limit` due hints in turns of their tenants, within each tenant's cap."""
        self._ripen(now)
        taken: list[Held] = []
        asked: dict[TenantId, int] = {}
        resting: list[TenantId] = []
        while self._turns and len(taken) < limit:
            tenant = self._turns.popleft()
            waiting = self._due[tenant]
            if load.room(tenant) <= asked.get(tenant, 0):
                resting.append(tenant)
                continue
            taken.append(waiting.popleft())
            asked[tenant] = asked.get(tenant, 0) + 1
            if waiting:
                self._turns.append(tenant)
            else:
                del self._due[tenant]
        self._turns.extend(resting)
        return taken

    def put_back(self, hints: Iterable[Held]) -> None:
        """Hints that could not be asked for (the database was away): due still."""
        for held in hints:
            heapq.heappush(self._early, (held.ref.fire_after, next(self._order), held))

    def used(self, hints: Iterable[Held]) -> None:
        """These hints are done with, whatever the database made of them."""
        for held in hints:
            self._size -= 1
            if (progress := self._partitions.get(held.partition)) is not None:
                progress.used(held.offset)

    def drop_older(self, than: datetime) -> int:
        """Give up hints that were due before `than`: the sweep has had them long since. How many."""
        dropped: list[Held] = []
        while self._early and self._early[0][0] < than:
            dropped.append(heapq.heappop(self._early)[2])
        for tenant, waiting in list(self._due.items()):
            while waiting and waiting[0].ref.fire_after < than:
                dropped.append(waiting.popleft())
            if not waiting:
                del self._due[tenant]
                self._turns.remove(tenant)
        self.used(dropped)
        return len(dropped)

    def next_due_at(self) -> datetime | None:
        """When the earliest waiting hint is due; None when only capped or no hints wait."""
        return self._early[0][0] if self._early else None

    def has_ripe(self, load: TenantLoad) -> bool:
        return any(load.room(tenant) > 0 for tenant in self._turns)

    def committable(self) -> dict[int, int]:
        """Per partition the offset of the oldest hint not used yet, or the one after the last message seen."""
        return {partition: progress.position() for partition, progress in self._partitions.items()}

    def forget(self, partitions: Iterable[int]) -> None:
        """Partitions that belong to somebody else now: their hints may stay, their offsets are not ours to commit."""
        for partition in partitions:
            self._partitions.pop(partition, None)

    def _ripen(self, now: datetime) -> None:
        while self._early and self._early[0][0] <= now:
            held = heapq.heappop(self._early)[2]
            waiting = self._due.get(held.ref.tenant_id)
            if waiting is None:
                waiting = self._due[held.ref.tenant_id] = deque()
                self._turns.append(held.ref.tenant_id)
            waiting.append(held)

    def _progress(self, partition: int) -> _Progress:
        found = self._partitions.get(partition)
        if found is None:
            found = self._partitions[partition] = _Progress()
        return found


class _Progress:
    """The offsets of one partition that are still waited for. Received in order, used in any order."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._used: set[int] = set()
        self._next = 0

    def received(self, offset: int) -> None:
        self.seen(offset)
        heapq.heappush(self._open, offset)

    def seen(self, offset: int) -> None:
        if offset < self._next:
            # Read again from an earlier place: a rebalance, an offset reset, or a topic that was made anew.
            self._open.clear()
            self._used.clear()
        self._next = offset + 1

    def used(self, offset: int) -> None:
        self._used.add(offset)

    def position(self) -> int:
        while self._open and self._open[0] in self._used:
            self._used.discard(heapq.heappop(self._open))
        return self._open[0] if self._open else self._next
