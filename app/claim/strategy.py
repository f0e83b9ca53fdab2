"""The one seam between the two claim modes. Chosen in the composition root; nothing else knows which one runs.

The lease verbs are not part of it: they are one implementation under both modes, which is what "the domain model is
unchanged" means (ADR 0033).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.domain.run import ClaimedRun, RunRef


class ClaimStrategy(Protocol):
    """How due runs reach this replica. It decides nothing about a run's fate."""

    async def open(self) -> None:
        """Get ready. Raises ConfigError for wrong configuration, never because something is unreachable."""

    async def announce(self, runs: Sequence[RunRef]) -> None:
        """Tell executors, after the commit, that these runs exist. Returns at once, never raises; may be lost."""

    async def claim(self, limit: int) -> list[ClaimedRun]:
        """At most `limit` due runs, each leased to us in PostgreSQL before it is returned; may be fewer or none.

        Waits a moment when nothing is due. Cancelling it loses nothing: what was leased is given back.
        """

    async def leave(self) -> None:
        """Receive no more: `claim` returns nothing from here on. Leases are untouched."""

    async def close(self) -> None:
        """Give resources back; after `leave`."""
