"""A schedule: the tenant's definition of when and where, and the words for what may happen to it.

active --rule has no further occurrence--> finished --changed recurrence--> active
active --pause--> paused --resume--> active (or finished)
active --cannot be planned--> error --resume or changed recurrence--> active
any --delete--> deleted (for good; only the history stays readable)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from app.domain.ids import ScheduleId, TenantId
from app.domain.recurrence import Recurrence, validate
from app.domain.retry import RetryPolicy
from app.domain.target import Target
from app.errors import InvalidInput

NAME_LENGTH_MAX: Final = 200
REASON_LENGTH_MAX: Final = 500

EXPIRES_AFTER_DEFAULT: Final = timedelta(days=1)
EXPIRES_AFTER_MIN: Final = timedelta(seconds=1)
EXPIRES_AFTER_MAX: Final = timedelta(days=30)
"""No run stays open for much longer than this, which bounds every search for a schedule's open runs."""


class ScheduleStatus(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"
    FINISHED = "finished"
    ERROR = "error"
    DELETED = "deleted"


class Misfire(StrEnum):
    """What becomes of occurrences that nobody planned in time (after an outage, never after a mere
    hiccup).
    """

    FIRE_ONCE = "fire_once"
    """The latest one gets its run."""
    FIRE_ALL = "fire_all"
    """Each gets its run, the latest ones first of all: bounded in count, and in age by `expires_after`."""
    SKIP = "skip"
    """None gets a run."""


class Overlap(StrEnum):
    """What becomes of a run whose schedule has an earlier run that has not ended. Decided at fire time."""

    ALLOW = "allow"
    SKIP = "skip"


class SkipReason(StrEnum):
    """Why an occurrence has no run. The vocabulary of `disposition.reason`."""

    MISFIRE = "misfire"
    EXPIRED = "expired"
    TOO_OLD = "too_old"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    SUPERSEDED = "superseded"
    SCHEDULE_DELETED = "schedule_deleted"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`version` counts the changes a person can see (edits, pause, resume, quarantine), not the planner's
    progress.

    `next_fire_at` is the first occurrence that is not planned yet; None exactly when there is none any more.
    `last_fire_at` is the last occurrence that got a run from its rule. `expires_after` is how long after its
    instant a run may still start.
    """

    id: ScheduleId
    tenant_id: TenantId
    name: str
    status: ScheduleStatus
    status_reason: str | None
    version: int
    recurrence: Recurrence
    target: Target
    retry: RetryPolicy
    misfire: Misfire
    overlap: Overlap
    expires_after: timedelta
    next_fire_at: datetime | None
    last_fire_at: datetime | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Damaged:
    """A stored schedule whose rule, target or policy cannot be understood (any more). It can be seen and deleted;
    the planner sets it aside.
    """

    id: ScheduleId
    name: str
    status: ScheduleStatus
    version: int
    problem: str
    misfire: Misfire
    overlap: Overlap
    expires_after: timedelta
    next_fire_at: datetime | None
    last_fire_at: datetime | None
    created_at: datetime
    updated_at: datetime


def new_schedule(
    schedule: ScheduleId,
    tenant: TenantId,
    *,
    name: str,
    recurrence: Recurrence,
    target: Target,
    now: datetime,
    retry: RetryPolicy | None = None,
    misfire: Misfire = Misfire.FIRE_ONCE,
    overlap: Overlap = Overlap.ALLOW,
    expires_after: timedelta = EXPIRES_AFTER_DEFAULT,
) -> Schedule:
    """An active schedule whose first occurrence is the rule's first strictly after `now`, the *database's*
    clock.

    Raises InvalidInput naming the field.
    """
    return Schedule(
        id=schedule,
        tenant_id=tenant,
        name=checked_name(name),
        status=ScheduleStatus.ACTIVE,
        status_reason=None,
        version=1,
        recurrence=recurrence,
        target=target,
        retry=retry or RetryPolicy(),
        misfire=misfire,
        overlap=overlap,
        expires_after=checked_expires_after(expires_after),
        next_fire_at=validate(recurrence, now=now, schedule_id=schedule),
        last_fire_at=None,
        created_at=now,
        updated_at=now,
    )


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """What an edit asks for; None leaves a field as it is."""

    name: str | None = None
    recurrence: Recurrence | None = None
    target: Target | None = None
    retry: RetryPolicy | None = None
    misfire: Misfire | None = None
    overlap: Overlap | None = None
    expires_after: timedelta | None = None


def changed(schedule: Schedule, change: ScheduleChange) -> Schedule:
    """`schedule` with the asked-for fields, nothing else touched; equal to `schedule` when nothing really
    changes.

    Raises InvalidInput naming the field.
    """
    return replace(
        schedule,
        name=schedule.name if change.name is None else checked_name(change.name),
        recurrence=change.recurrence or schedule.recurrence,
        target=change.target or schedule.target,
        retry=change.retry or schedule.retry,
        misfire=change.misfire or schedule.misfire,
        overlap=change.overlap or schedule.overlap,
        expires_after=(
            schedule.expires_after
            if change.expires_after is None
            else checked_expires_after(change.expires_after)
        ),
    )


def checked_name(name: str) -> str:
    """`name` itself. Raises InvalidInput("name") unless it is 1 to 200 storable characters, not all blank."""
    if not name.strip():
        raise InvalidInput("name", "must not be empty or blank")
    return _checked_text("name", name, NAME_LENGTH_MAX)


def checked_reason(reason: str) -> str:
    """`reason` itself. Raises InvalidInput("reason") unless it is at most 500 storable characters."""
    return _checked_text("reason", reason, REASON_LENGTH_MAX)


def checked_expires_after(expires_after: timedelta) -> timedelta:
    """`expires_after` itself. Raises InvalidInput("expires_after_seconds") unless it is 1 second to 30
    days.
    """
    if not EXPIRES_AFTER_MIN <= expires_after <= EXPIRES_AFTER_MAX:
        low, high = EXPIRES_AFTER_MIN.total_seconds(), EXPIRES_AFTER_MAX.total_seconds()
        raise InvalidInput("expires_after_seconds", f"must lie between {low:.0f} and {high:.0f} seconds")
    return expires_after


def _checked_text(field: str, text: str, length: int) -> str:
    if len(text) > length:
        raise InvalidInput(field, f"must have at most {length} characters; this has {len(text)}")
    if "\0" in text:
        raise InvalidInput(field, "must not contain the NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(field, "must not contain unpaired surrogates") from None
    return text
