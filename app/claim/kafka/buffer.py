"""Hints that were received and not yet used: the early ones wait for their time, the due ones for their tenant's turn.

A hint stays uncommitted until it was used, so that the next owner of its partition gets it again in time: committed
early, a clean deploy made 300 of 300 hints nine seconds late. When the buffer is full, partitions are paused.

A hint that comes again (sent twice, or read again after a rebalance) is the same hint in one more place: it is asked
for once, and all its places are free then.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from itertools import count

from app.claim.load import TenantLoad
from app.domain.ids import TenantId
from app.domain.run import RunRef


class HintBuffer:
    """Holds about `capacity` hints, counted by their places on the topic. One process, one event loop.

    A hint is `add`ed, `take`n when it is due and its turn has come, and then either `used` or `put_back`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: dict[RunRef, list[_Place]] = {}
        self._early: list[tuple[datetime, int, RunRef]] = []
        self._order = count()
        self._due: dict[TenantId, deque[RunRef]] = {}
        self._turns: deque[TenantId] = deque()
        self._partitions: dict[int, _Progress] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def is_full(self) -> bool:
        return self._size >= self._capacity

    def add(self, ref: RunRef, *, partition: int, offset: int) -> None:
        """Take in a hint and where it came from."""
        progress = self._seen(partition, offset)
        progress.received(offset)
        self._size += 1
        if (places := self._places.get(ref)) is not None:
            places.append((progress, offset))
        else:
            self._places[ref] = [(progress, offset)]
            self._wait_for_its_time(ref)

    def passed_over(self, partition: int, offset: int) -> None:
        """A message that is no hint of ours: nothing to wait for."""
        self._seen(partition, offset)

    def take(self, now: datetime, limit: int, load: TenantLoad) -> list[RunRef]:
        """At most `limit` due hints in turns of their tenants, within each tenant's cap."""
        self._ripen(now)
        taken: list[RunRef] = []
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

    def put_back(self, refs: Iterable[RunRef]) -> None:
        """Hints that were taken and could not be asked for (the database was away): due still."""
        for ref in refs:
            self._wait_for_its_time(ref)

    def used(self, refs: Iterable[RunRef]) -> None:
        """These hints are done with, whatever the database made of them."""
        for ref in refs:
            places = self._places.pop(ref)
            self._size -= len(places)
            for progress, offset in places:
                progress.used(offset)

    def drop_older(self, than: datetime) -> int:
        """Give up hints that were due before `than`: the sweep has had them long since. How many.

        One that came in behind younger ones of its tenant stays until it is at their head.
        """
        dropped: list[RunRef] = []
        while self._early and self._early[0][0] < than:
            dropped.append(heapq.heappop(self._early)[2])
        for tenant, waiting in list(self._due.items()):
            while waiting and waiting[0].fire_after < than:
                dropped.append(waiting.popleft())
            if not waiting:
                del self._due[tenant]
                self._turns.remove(tenant)
        self.used(dropped)
        return len(dropped)

    def next_due_at(self) -> datetime | None:
        """When the earliest waiting hint is due; None when only capped or no hints wait."""
        return self._early[0][0] if self._early else None

    def has_ripe(self, now: datetime, load: TenantLoad) -> bool:
        """Whether `take` would give anything."""
        self._ripen(now)
        return any(load.room(tenant) > 0 for tenant in self._turns)

    def committable(self) -> dict[int, int]:
        """Per partition the offset of the oldest hint not used yet, or the one after the last message seen."""
        return {partition: progress.position() for partition, progress in self._partitions.items()}

    def forget_partitions(self) -> None:
        """Whoever owns the partitions from now on reads them from where was committed: our hints may stay (the claim
        refuses what another has), our offsets are not to be committed."""
        self._partitions.clear()

    def _wait_for_its_time(self, ref: RunRef) -> None:
        heapq.heappush(self._early, (ref.fire_after, next(self._order), ref))

    def _ripen(self, now: datetime) -> None:
        while self._early and self._early[0][0] <= now:
            ref = heapq.heappop(self._early)[2]
            waiting = self._due.get(ref.tenant_id)
            if waiting is None:
                waiting = self._due[ref.tenant_id] = deque()
                self._turns.append(ref.tenant_id)
            waiting.append(ref)

    def _seen(self, partition: int, offset: int) -> _Progress:
        """What is known of the partition, with this message as the last one that was read."""
        progress = self._partitions.get(partition)
        if progress is None or offset < progress.next:
            # Never read before, or read again from an earlier place: after a rebalance, an offset reset, or on a topic
            # that was made anew. What was held of it stays held, and has no say any more in what is committed.
            progress = self._partitions[partition] = _Progress()
        progress.next = offset + 1
        return progress


class _Progress:
    """The offsets of one partition that are still waited for. Received in order, used in any order."""

    def __init__(self) -> None:
        self.next = 0
        self._open: deque[int] = deque()
        self._used: set[int] = set()

    def received(self, offset: int) -> None:
        self._open.append(offset)

    def used(self, offset: int) -> None:
        self._used.add(offset)

    def position(self) -> int:
        while self._open and self._open[0] in self._used:
            self._used.discard(self._open.popleft())
        return self._open[0] if self._open else self.next


_Place = tuple[_Progress, int]
