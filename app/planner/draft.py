"""Computing before writing: what a batch of locked schedules is to become, and which of them cannot be
computed.

Nothing here touches the database, so that one schedule that raises never costs the others their transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain.ids import ScheduleId, run_id
from app.domain.plan import Due, Limits, Skipped, plan
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
    drafts: list[Draft] = []
    poison: dict[ScheduleId, str] = {}
    taken = 0
    runs = 0
    for row in rows:
        taken += 1
        try:
            one = draft(row, now=now, horizon=horizon, limits=limits)
        except Exception as error:  # noqa: BLE001  # whatever one schedule raises is that schedule's own affair
            poison[row.id] = f"{type(error).__name__}: {error}"
            continue
        if one.next_fire_at != row.next_fire_at:
            drafts.append(one)
            runs += len(one.runs)
        if runs >= runs_at_most or clock() >= deadline:
            break
    return Drafts(drafts, poison, taken)


def draft(row: DueRow, *, now: datetime, horizon: datetime, limits: Limits) -> Draft:
    """Draft one schedule. Raises whatever its rule, its policies or `plan` raise."""
    due = Due(
        row.id,
        recurrences.from_json(row.recurrence),
        Misfire(row.misfire),
        row.expires_after,
        row.next_fire_at,
    )
    planned = plan(due, now=now, horizon=horizon, limits=limits)
    max_attempts = _max_attempts(row.retry)
    runs = tuple(
        NewRun(
            id=run_id(row.id, at),
            scheduled_for=at,
            tenant_id=row.tenant_id,
            schedule_id=row.id,
            schedule_version=row.version,
            max_attempts=max_attempts,
            expires_at=at + row.expires_after,
        )
        for at in planned.occurrences
    )
    return Draft(row, runs, planned.skipped, planned.next_fire_at)


@lru_cache(maxsize=4_096)
def _max_attempts(retry: str) -> int:
    return retries.from_json(retry).max_attempts
