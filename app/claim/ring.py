"""Whose turn it is: the tenants with due runs, dealt idle slots in a circle.

Fairness is decided here, at claim time. A rank fixed when a run is planned (seconds early) either fails late arrivals
or starves the heavy tenant; a circle held by the claimer costs nothing and bounds everybody's wait by one round of
the active tenants.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from uuid import UUID

from app.claim.load import TenantLoad
from app.domain.ids import TenantId
from app.domain.run import ClaimedRun
from app.store.claims import LEFT_END, Cursor, Share

QUANTUM = 4
"""Runs that a tenant with a deep backlog gets in its turn, when there are more tenants than slots: four runs of one
tenant cost a claim little more than one. Every tenant begins with one."""


class TenantRing:
    """A circle of tenants believed to have due runs. A tenant that returns less than it was asked for leaves it."""

    def __init__(self, rng: random.Random) -> None:
        self._quanta: OrderedDict[TenantId, int] = OrderedDict()  # in order of their turns
        self._cursors: dict[TenantId, Cursor] = {}
        self.discover_behind = UUID(int=rng.getrandbits(128))
        """Where the next look for due tenants starts; random at first, so that replicas start apart."""

    def __len__(self) -> int:
        return len(self._quanta)

    def join(self, tenants: Iterable[TenantId]) -> None:
        for tenant in tenants:
            self._quanta.setdefault(tenant, 1)

    def join_first(self, tenants: Iterable[TenantId]) -> None:
        """Tenants that had nothing due a moment ago: their turn is now, not after a whole round of the others."""
        for tenant in tenants:
            if tenant not in self._quanta:
                self._quanta[tenant] = 1
                self._quanta.move_to_end(tenant, last=False)

    def deal(self, limit: int, load: TenantLoad) -> list[Share]:
        """Shares of `limit` slots for the tenants whose turn it is, each at most once and within its cap.

        With more tenants than slots everybody asked gets its quantum; with fewer, the slots are spread evenly.
        """
        open_to = self._first_with_room(limit, load)
        if not open_to:
            return []
        even = -(-limit // len(open_to))
        shares: list[Share] = []
        left = limit
        for tenant in open_to:
            if left == 0:
                break
            wanted = even if even > 1 else self._quanta[tenant]
            take = min(wanted, load.room(tenant), left)
            shares.append(Share(tenant, take, self._cursors.get(tenant, LEFT_END)))
            left -= take
        return shares

    def _first_with_room(self, limit: int, load: TenantLoad) -> list[TenantId]:
        """At most `limit` of them: a claim must not cost a look at every tenant of a large circle."""
        with_room = (tenant for tenant in self._quanta if load.room(tenant) > 0)
        return list(islice(with_room, limit))

    def served(self, shares: Sequence[Share], runs: Sequence[ClaimedRun]) -> None:
        """Take note of what a claim of `shares` returned: cursors move, the served go to the back, the empty leave."""
        got: dict[TenantId, int] = {}
        for run in runs:
            ref = run.lease.ref
            got[ref.tenant_id] = got.get(ref.tenant_id, 0) + 1
            self._cursors[ref.tenant_id] = Cursor(ref.fire_after, ref.id)
        for share in shares:
            if got.get(share.tenant_id, 0) < share.limit:
                self._quanta.pop(share.tenant_id, None)
                self._cursors.pop(share.tenant_id, None)
            else:
                self._quanta[share.tenant_id] = min(2 * self._quanta[share.tenant_id], QUANTUM)
                self._quanta.move_to_end(share.tenant_id)

    def rewind(self) -> None:
        """Forget all cursors: the next claims look from each tenant's left end again."""
        self._cursors.clear()
