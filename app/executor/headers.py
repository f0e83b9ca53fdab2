"""The headers by which a receiver knows what it got: the same on every attempt, but for its number."""

from __future__ import annotations

import random

from app.domain.run import ClaimedRun


def identity_headers(run: ClaimedRun, rng: random.Random) -> tuple[tuple[str, str], ...]:
    """`webhook-id` is the delivery id to de-duplicate by (Standard Webhooks); `traceparent` is W3C Trace Context's."""
    ref = run.lease.ref
    return (
        ("webhook-id", str(run.delivery_id)),
        ("carillon-schedule-id", str(run.schedule_id)),
        ("carillon-run-id", str(ref.id)),
        ("carillon-attempt", str(run.lease.attempt)),
        ("carillon-scheduled-for", ref.scheduled_for.isoformat().replace("+00:00", "Z")),
        ("traceparent", f"00-{ref.id.hex}-{rng.getrandbits(64) or 1:016x}-01"),
    )
