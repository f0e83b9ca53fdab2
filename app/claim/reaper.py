"""Recovering expired leases when no claim comes by: a backstop for idle and for full fleets."""

from __future__ import annotations

import logging
from datetime import timedelta

from app import metrics
from app.claim.strategy import ClaimStrategy
from app.store import leases
from app.store.claims import LEFT_END
from app.store.pool import Pool, acquire

logger = logging.getLogger(__name__)

SLICE = 5_000
"""Entries of the claim index looked at per pass."""


class Reaper:
    """Remembers how far it has come. `pool` must have been made with PLAN_GUARDS."""

    def __init__(self, pool: Pool, claims: ClaimStrategy, *, ttl: timedelta) -> None:
        self._pool = pool
        self._claims = claims
        self._ttl = ttl
        self._behind = LEFT_END

    async def reap_expired(self) -> None:
        """One pass over the next slice; another replica at it makes this a pass over nothing."""
        async with acquire(self._pool) as conn:
            reaped = await leases.reap(conn, behind=self._behind, limit=SLICE, longest=self._ttl)
        self._behind = reaped.go_on_behind or LEFT_END
        count = len(reaped.freed) + reaped.ended
        if count:
            logger.warning("lease.reaped", extra={"freed": len(reaped.freed), "ended": reaped.ended})
            metrics.REAPED.inc(count)
        if reaped.freed:
            await self._claims.announce(reaped.freed)
