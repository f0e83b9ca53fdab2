"""Schedules on the wire, and how a body becomes a change."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeVar, assert_never
from uuid import UUID

from pydantic import Field

from app.api.problems import Fault, ProblemError
from app.api.shapes import RecurrenceJson, RetryJson, TargetJson
from app.api.values import NEXT_CURSOR, Body, JsonObject, Paging, Shown, Text
from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain import target as targets
from app.domain.address import AddressPolicy
from app.domain.ids import ScheduleId, TenantId
from app.domain.schedule import (
    EXPIRES_AFTER_DEFAULT,
    EXPIRES_AFTER_MAX,
    EXPIRES_AFTER_MIN,
    NAME_LENGTH_MAX,
    REASON_LENGTH_MAX,
    Damaged,
    Misfire,
    Overlap,
    Schedule,
    ScheduleChange,
    ScheduleStatus,
    checked_name,
    new_schedule,
)
from app.domain.target import MASK, Target, masked
from app.errors import InvalidInput
from app.store.history import DispositionRecord

T = TypeVar("T")

Name = Annotated[Text, Field(max_length=NAME_LENGTH_MAX, description="For people; need not be unique.")]
Seconds = Annotated[
    float,
    Field(
        strict=True,
        ge=EXPIRES_AFTER_MIN.total_seconds(),
        le=EXPIRES_AFTER_MAX.total_seconds(),
        allow_inf_nan=False,
        description="How long after its instant a run may still start, in seconds.",
    ),
]


def _absent() -> Any:
    """The default of a field that keeps what it is when left out (null is not a way to leave it out)."""
    return None


class ScheduleBody(Body):
    name: Name
    recurrence: RecurrenceJson
    target: TargetJson
    retry: RetryJson = Field(default_factory=dict)
    misfire: Misfire = Field(
        Misfire.FIRE_ONCE, description="What becomes of occurrences missed in an outage."
    )
    overlap: Overlap = Field(Overlap.ALLOW, description="What becomes of a run while an earlier one is open.")
    expires_after_seconds: Seconds = EXPIRES_AFTER_DEFAULT.total_seconds()

    def to_schedule(
        self, schedule_id: ScheduleId, tenant: TenantId, *, now: datetime, policy: AddressPolicy
    ) -> Schedule:
        """The new schedule. Raises ProblemError naming every faulty part; InvalidInput for a rule that never
        fires."""
        faults = Faults()
        faults.of(lambda: checked_name(self.name))
        recurrence = faults.of(lambda: recurrences.parse(self.recurrence, now=now))
        target = faults.of(lambda: read_target(self.target, policy))
        retry = faults.of(lambda: retries.parse(self.retry))
        faults.raise_any()
        assert recurrence is not None
        assert target is not None
        return new_schedule(
            schedule_id,
            tenant,
            name=self.name,
            recurrence=recurrence,
            target=target,
            now=now,
            retry=retry,
            misfire=self.misfire,
            overlap=self.overlap,
            expires_after=timedelta(seconds=self.expires_after_seconds),
        )


class ScheduleChangeBody(Body):
    """Each field given replaces the old value as a whole; a field left out stays."""

    name: Name = Field(default_factory=_absent)
    recurrence: RecurrenceJson = Field(default_factory=_absent)
    target: TargetJson = Field(default_factory=_absent)
    retry: RetryJson = Field(default_factory=_absent)
    misfire: Misfire = Field(default_factory=_absent)
    overlap: Overlap = Field(default_factory=_absent)
    expires_after_seconds: Seconds = Field(default_factory=_absent)

    def to_change(self, old: Schedule | Damaged, *, now: datetime, policy: AddressPolicy) -> ScheduleChange:
        """What is asked for of `old`. Raises ProblemError naming every faulty part."""
        given = self.model_fields_set
        faults = Faults()
        if "name" in given:
            faults.of(lambda: checked_name(self.name))
        recurrence = target = retry = expires_after = None
        if "recurrence" in given:
            rule = old.recurrence if isinstance(old, Schedule) else None
            recurrence = faults.of(lambda: recurrences.parse(self.recurrence, now=now, old=rule))
        if "target" in given:
            target = faults.of(lambda: read_target(self.target, policy))
        if "retry" in given:
            retry = faults.of(lambda: retries.parse(self.retry))
        if "expires_after_seconds" in given:
            expires_after = timedelta(seconds=self.expires_after_seconds)
        faults.raise_any()
        return ScheduleChange(
            name=self.name,
            recurrence=recurrence,
            target=target,
            retry=retry,
            misfire=self.misfire,
            overlap=self.overlap,
            expires_after=expires_after,
        )


class PauseBody(Body):
    reason: Text | None = Field(
        None, max_length=REASON_LENGTH_MAX, description="For people; shown as status_reason."
    )


class ListedStatus(StrEnum):
    """What a schedule in a list can be: deleted ones are in none."""

    ACTIVE = ScheduleStatus.ACTIVE
    PAUSED = ScheduleStatus.PAUSED
    FINISHED = ScheduleStatus.FINISHED
    ERROR = ScheduleStatus.ERROR


class ScheduleQuery(Paging):
    status: ListedStatus | None = Field(None, description="Only schedules in this state.")


class ScheduleShown(Shown):
    id: UUID
    name: str
    status: ScheduleStatus
    status_reason: str | None
    version: int = Field(description="Counts the visible changes; the ETag is this number.")
    recurrence: RecurrenceJson | None = Field(description="null where it cannot be understood any more.")
    target: TargetJson | None = Field(description="null as above.")
    retry: RetryJson | None = Field(description="null as above.")
    misfire: Misfire
    overlap: Overlap
    expires_after_seconds: float
    next_fire_at: datetime | None = Field(
        description="The first occurrence that is not planned yet; null when none is left. Runs are planned "
        "some seconds ahead, so one that is due before this may be in the history already."
    )
    last_fire_at: datetime | None = Field(
        description="The last occurrence that got a run from the rule. It is planned, not sent, and so may lie "
        "some seconds in the future; whether it was sent is told by its run."
    )
    created_at: datetime
    updated_at: datetime


class SchedulePage(Shown):
    schedules: list[ScheduleShown]
    next_cursor: str | None = NEXT_CURSOR


class DispositionShown(Shown):
    """A gapless stretch of occurrences without runs, and why."""

    first_at: datetime
    last_at: datetime
    occurrences: int
    reason: str
    created_at: datetime


class DispositionPage(Shown):
    dispositions: list[DispositionShown]
    next_cursor: str | None = NEXT_CURSOR


class Faults:
    """Collects what the domain's readers refuse, so that one answer names a fault of every part."""

    def __init__(self, *, inside: str = "") -> None:
        """`inside` is the part of the readers' field names that the body as a whole stands for."""
        self._inside = inside
        self._found: list[Fault] = []

    def of(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except InvalidInput as error:
            self._found.append(Fault(error.field.removeprefix(self._inside), error.problem))
            return None

    def raise_any(self) -> None:
        if self._found:
            first = self._found[0]
            raise ProblemError("invalid-input", f"{first.field}: {first.detail}", faults=self._found)


def read_target(given: JsonObject, policy: AddressPolicy) -> Target:
    """The target, its form and its address judged. Raises InvalidInput.

    A masked value is what answers show in place of a secret: written back, it would replace the secret.
    """
    target = targets.parse(given)
    for name, value in target.headers:
        if value == MASK:
            raise InvalidInput(f"target.headers.{name}", f"give the real value; {MASK} only stands for it")
    targets.check_allowed(target, policy)
    return target


def show_schedule(schedule: Schedule | Damaged) -> ScheduleShown:
    match schedule:
        case Schedule():
            reason = schedule.status_reason
            recurrence: JsonObject | None = dict(recurrences.to_json(schedule.recurrence))
            target: JsonObject | None = _show_target(schedule.target)
            retry: JsonObject | None = json.loads(retries.to_json(schedule.retry))
        case Damaged():
            reason = schedule.problem
            recurrence = target = retry = None
        case _:
            assert_never(schedule)
    return ScheduleShown(
        id=schedule.id,
        name=schedule.name,
        status=schedule.status,
        status_reason=reason,
        version=schedule.version,
        recurrence=recurrence,
        target=target,
        retry=retry,
        misfire=schedule.misfire,
        overlap=schedule.overlap,
        expires_after_seconds=schedule.expires_after.total_seconds(),
        next_fire_at=schedule.next_fire_at,
        last_fire_at=schedule.last_fire_at,
        created_at=schedule.created_at,
        updated_at=schedule.updated_at,
    )


def _show_target(target: Target) -> JsonObject:
    return {
        "method": target.method,
        "url": target.url,
        "headers": {name: masked(name, value) for name, value in target.headers},
        "body": target.body,
    }


def show_disposition(record: DispositionRecord) -> DispositionShown:
    return DispositionShown(
        first_at=record.first_at,
        last_at=record.last_at,
        occurrences=record.occurrences,
        reason=record.reason,
        created_at=record.created_at,
    )
