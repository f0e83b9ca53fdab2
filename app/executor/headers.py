"""The headers by which a receiver knows what it got: the same on every attempt, but for its number."""

from __future__ import annotations

import random
from datetime import datetime
from functools import lru_cache

from app.domain.run import ClaimedRun


def identity_headers(run: ClaimedRun, rng: random.Random) -> tuple[tuple[str, str], ...]:
    """`webhook-id` is the delivery id to de-duplicate by (Standard Webhooks); `traceparent` is W3C Trace Context's."""
    ref = run.lease.ref
    return (
        ("webhook-id", str(run.delivery_id)),
        ("carillon-schedule-id", str(run.schedule_id)),
        ("carillon-run-id", str(ref.id)),
        ("carillon-attempt", str(run.lease.attempt)),
        ("carillon-scheduled-for", _text_of(ref.scheduled_for)),
        ("traceparent", f"00-{ref.id.hex}-{rng.getrandbits(64) or 1:016x}-01"),
    )


@lru_cache(maxsize=1024)
def _text_of(instant: datetime) -> str:
    """In UTC, as the store reads it. A burst has one instant for all."""
    return instant.isoformat().replace("+00:00", "Z")
