"""Computing before writing: what a batch of locked schedules is to become, and which of them cannot be
computed.

Nothing here touches the database, so that one schedule that raises never costs the others their transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain.ids import ScheduleId, run_id
from app.domain.plan import Due, Limits, Plan, Skipped, is_shared, plan
from app.domain.schedule import Misfire
from app.store.planning import DueRow, NewRun


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be written for one schedule."""

    row: DueRow
    runs: tuple[NewRun, ...]
    skipped: tuple[Skipped, ...]
    next_fire_at: datetime | None


@dataclass(frozen=True, slots=True)
class Drafts:
    """`taken` is how many rows were looked at, from the first on; the rest waits. `poison` says what was
    wrong.
    """

    drafts: list[Draft]
    poison: dict[ScheduleId, str]
    taken: int


def draft_all(
    rows: Sequence[DueRow],
    *,
    now: datetime,
    horizon: datetime,
    limits: Limits,
    runs_at_most: int,
    budget: timedelta,
    clock: Callable[[], float] = time.monotonic,
) -> Drafts:
    """Draft row after row until there are `runs_at_most` runs or `budget` is spent; always at least one row.

    The bounds are looked at after each schedule, whose own plan is bounded by `limits`.
    """
    deadline = clock() + budget.total_seconds()
    bounds = _Bounds(now, horizon, limits)
    drafts: list[Draft] = []
    poison: dict[ScheduleId, str] = {}
    taken = 0
    runs = 0
    for row in rows:
        taken += 1
        try:
            one = _draft(row, bounds)
        except Exception as error:  # noqa: BLE001  # whatever one schedule raises is its own affair
            poison[row.id] = f"{type(error).__name__}: {error}"
        else:
            if one.next_fire_at != row.next_fire_at:
                drafts.append(one)
                runs += len(one.runs)
        if runs >= runs_at_most or clock() >= deadline:
            break
    return Drafts(drafts, poison, taken)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a batch has in common. `plans` remembers: a hundred thousand schedules on the hour are one
    plan.
    """

    now: datetime
    horizon: datetime
    limits: Limits
    plans: dict[tuple[str, datetime, str, timedelta], Plan] = field(default_factory=dict)


def _draft(row: DueRow, bounds: _Bounds) -> Draft:
    """Draft one schedule. Raises whatever its rule, its policies or `plan` raise."""
    planned = _plan(row, bounds)
    max_attempts = retries.from_json(row.retry).max_attempts
    runs = tuple(
        [
            NewRun(
                run_id(row.id, at),
                at,
                row.tenant_id,
                row.id,
                row.version,
                max_attempts,
                at + row.expires_after,
            )
            for at in planned.occurrences
        ]
    )
    return Draft(row, runs, planned.skipped, planned.next_fire_at)


def _plan(row: DueRow, bounds: _Bounds) -> Plan:
    key = (row.recurrence, row.next_fire_at, row.misfire, row.expires_after)
    planned = bounds.plans.get(key)
    if planned is None:
        recurrence = recurrences.from_json(row.recurrence)
        due = Due(row.id, recurrence, Misfire(row.misfire), row.expires_after, row.next_fire_at)
        planned = plan(due, now=bounds.now, horizon=bounds.horizon, limits=bounds.limits)
        if is_shared(recurrence):
            bounds.plans[key] = planned
    return planned
