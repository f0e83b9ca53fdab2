"""One attempt, step by step: admit → hold the lease → deliver → decide → settle. Reads like the story it tells.

Nothing is sent without the lease: `hold.confirm` runs right before the first byte. Nothing that may have been sent is
forgotten: every way out of the delivery ends in a settlement, except losing the lease, whose evidence the claim that
took it has written already.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never

from app import metrics
from app.boottime import boottime
from app.claim.keeper import Hold, LeaseKeeper, Standing
from app.domain.admit import admit
from app.domain.outcome import Abandoned, Blocked, Outcome, Sent, Timing, name_of
from app.domain.retry import decide
from app.domain.run import Cancel, ClaimedRun, Evidence, Fail, Reason, Release, Settled, Settlement
from app.errors import LeaseLost
from app.executor.deliver import Deliverer
from app.executor.flight import Flight
from app.executor.headers import identity_headers
from app.executor.settler import Settler
from app.store.orders import Order

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """What every attempt of this replica works with. `timeout` is the whole attempt's, first look-up to last byte."""

    keeper: LeaseKeeper
    deliverer: Deliverer
    settler: Settler
    worker: str
    timeout: timedelta
    rng: random.Random


async def attempt_run(run: ClaimedRun, order: Order | None, desk: Desk) -> None:
    """Carry one claimed run to its settlement. Raises nothing that a target can cause."""
    with desk.keeper.hold(run) as hold:
        unsent = admit(run) or _unusable(order)
        if unsent is not None or order is None:
            await desk.settler.settle(Settled(run.lease, unsent or Cancel(Reason.SCHEDULE_DELETED), None))
            return
        settled = await _deliver(run, order, hold, desk)
        if settled is not None:
            await desk.settler.settle(settled)


def _unusable(order: Order | None) -> Settlement | None:
    if order is not None and order.target is None:
        logger.error(
            "order.unusable", extra={"schedule_id": str(order.schedule_id), "problem": order.problem}
        )
        return Fail(Reason.TARGET_UNUSABLE)
    return None


async def _deliver(run: ClaimedRun, order: Order, hold: Hold, desk: Desk) -> Settled | None:
    """Send the request and decide what its outcome means; None when the lease was lost on the way."""
    assert order.target is not None
    flight = Flight()
    started_at = database_time(run)
    sent: Sent | None = None
    try:
        with hold.interruptible():
            outcome, sent = await desk.deliverer.deliver(
                order.target,
                headers=identity_headers(run, desk.rng),
                deadline=desk.timeout,
                before_send=hold.confirm,
                flight=flight,
            )
    except LeaseLost:
        # Right before the first byte: nothing left. Given back in case the row is still ours.
        return Settled(run.lease, Release(), None)
    except asyncio.CancelledError:
        if hold.standing is Standing.HELD:
            raise
        _forget_cancellation()
        return _interrupted(run, order, hold, flight, desk, started_at)
    evidence = _evidence(run, order, desk, outcome, sent, started_at)
    settlement = decide(
        outcome,
        attempt=run.lease.attempt,
        policy=order.retry,
        rng=desk.rng,
        now=evidence.finished_at,
        max_attempts=run.max_attempts,
    )
    _count(run, evidence)
    return Settled(run.lease, settlement, evidence)


def _interrupted(
    run: ClaimedRun, order: Order, hold: Hold, flight: Flight, desk: Desk, started_at: datetime
) -> Settled | None:
    """The request was cut off by us: what that means depends on why, and on whether it may have left."""
    outcome = Abandoned(
        "cancelled while it was sent" if hold.standing is Standing.CANCELLING else "the replica is stopping",
        is_maybe_delivered=flight.is_sent,
        timing=Timing(total=database_time(run) - started_at),
    )
    evidence = _evidence(run, order, desk, outcome, flight.sent, started_at) if flight.is_sent else None
    if evidence is not None:
        metrics.note_attempt(name_of(outcome))
    match hold.standing:
        case Standing.LOST:
            # Nothing left: given back in case the row is still ours (a database away until the local deadline).
            return None if flight.is_sent else Settled(run.lease, Release(), None)
        case Standing.CANCELLING:
            return Settled(run.lease, Cancel(Reason.CANCELLED), evidence)
        case Standing.ABANDONED | Standing.HELD:
            settlement = decide(
                outcome,
                attempt=run.lease.attempt,
                policy=order.retry,
                rng=desk.rng,
                now=database_time(run),
                max_attempts=run.max_attempts,
            )
            return Settled(run.lease, settlement, evidence)
        case _:
            assert_never(hold.standing)


def database_time(run: ClaimedRun) -> datetime:
    """Now, by the database's clock: its time at the claim plus what has passed here since the answer."""
    return run.granted_at + timedelta(seconds=boottime() - run.answered_at)


def _evidence(
    run: ClaimedRun, order: Order, desk: Desk, outcome: Outcome, sent: Sent | None, started_at: datetime
) -> Evidence:
    return Evidence(
        outcome=outcome,
        sent=sent,
        schedule_version=order.version,
        started_at=started_at,
        finished_at=database_time(run),
        worker=desk.worker,
    )


def _count(run: ClaimedRun, evidence: Evidence) -> None:
    metrics.note_attempt(name_of(evidence.outcome))
    metrics.DELIVERY_SECONDS.observe((evidence.finished_at - evidence.started_at).total_seconds())
    if run.lease.attempt == 1 and not isinstance(evidence.outcome, Blocked):
        connecting = evidence.outcome.timing.connect or timedelta()
        lateness = evidence.started_at + connecting - run.lease.ref.scheduled_for
        metrics.FIRE_LATENESS_SECONDS.observe(max(0.0, lateness.total_seconds()))


def _forget_cancellation() -> None:
    """The interrupt was ours and ends here: the settlement that follows must not be cancelled by it."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
