"""Whose turn it is: the tenants with due runs, dealt idle slots in a circle.

Fairness is decided here, at claim time. A rank fixed when a run is planned (seconds early) either fails late arrivals
or starves the heavy tenant; a circle held by the claimer costs nothing and bounds everybody's wait by one round of
the active tenants.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from uuid import UUID

from app.claim.load import TenantLoad
from app.domain.ids import TenantId
from app.domain.run import ClaimedRun
from app.store.claims import LEFT_END, Cursor, Share


class TenantRing:
    """A circle of tenants believed to have due runs. A tenant that returns less than it was asked for leaves it."""

    def __init__(self, rng: random.Random) -> None:
        self._order: deque[TenantId] = deque()
        self._members: set[TenantId] = set()
        self._cursors: dict[TenantId, Cursor] = {}
        self.discover_behind = UUID(int=rng.getrandbits(128))
        """Where the next look for due tenants starts; random at first, so that replicas start apart."""

    def __len__(self) -> int:
        return len(self._order)

    def join(self, tenants: Iterable[TenantId]) -> None:
        for tenant in tenants:
            if tenant not in self._members:
                self._members.add(tenant)
                self._order.append(tenant)

    def deal(self, limit: int, load: TenantLoad) -> list[Share]:
        """Shares of `limit` slots for the tenants whose turn it is, each at most once and within its cap.

        With more tenants than slots everybody asked gets one; with fewer, the slots are spread evenly.
        """
        open_to = [tenant for tenant in self._order if load.room(tenant) > 0]
        if not open_to:
            return []
        quantum = -(-limit // len(open_to))
        shares: list[Share] = []
        left = limit
        for tenant in open_to:
            if left == 0:
                break
            take = min(quantum, load.room(tenant), left)
            shares.append(Share(tenant, take, self._cursors.get(tenant, LEFT_END)))
            left -= take
        return shares

    def served(self, shares: Sequence[Share], runs: Sequence[ClaimedRun]) -> None:
        """Take note of what a claim of `shares` returned: cursors move, the served go to the back, the empty leave."""
        got: dict[TenantId, int] = {}
        for run in runs:
            ref = run.lease.ref
            got[ref.tenant_id] = got.get(ref.tenant_id, 0) + 1
            self._cursors[ref.tenant_id] = Cursor(ref.fire_after, ref.id)
        asked = {share.tenant_id for share in shares}
        emptied = {share.tenant_id for share in shares if got.get(share.tenant_id, 0) < share.limit}
        waiting = [tenant for tenant in self._order if tenant not in asked]
        served = [share.tenant_id for share in shares if share.tenant_id not in emptied]
        self._order = deque(waiting + served)
        self._members -= emptied
        for tenant in emptied:
            self._cursors.pop(tenant, None)

    def rewind(self) -> None:
        """Forget all cursors: the next claims look from each tenant's left end again."""
        self._cursors.clear()
