"""Runs and attempts on the wire."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from uuid import UUID

from pydantic import Field

from app.api.values import NEXT_CURSOR, Instant, JsonObject, Paging, Shown
from app.domain.run import Origin
from app.store.history import AttemptRecord, RunRecord, ShownStatus


class RunQuery(Paging):
    schedule_id: UUID | None = Field(None, description="Only runs of this schedule.")
    status: list[ShownStatus] = Field(
        [], max_length=len(ShownStatus), description="Only runs in one of these states; repeat for several."
    )
    from_at: Instant | None = Field(
        None, alias="from", description="The earliest scheduled_for; 7 days before `to` when left out."
    )
    to_at: Instant | None = Field(
        None,
        alias="to",
        description="All scheduled_for are before this; just behind what is planned already when left out.",
    )


class RunShown(Shown):
    id: UUID
    schedule_id: UUID
    scheduled_for: datetime = Field(description="The occurrence's instant.")
    status: ShownStatus = Field(description="`running` while an executor holds the run's lease.")
    reason: str | None = Field(description="Why it ended other than by the target's answer, or waits.")
    origin: Origin
    attempt: int = Field(description="How many attempts have begun.")
    max_attempts: int
    delivery_id: UUID = Field(
        description="What the receiver sees and de-duplicates by, the same on every attempt."
    )
    schedule_version: int
    replay_of: UUID | None
    fire_after: datetime = Field(description="When the next attempt may start.")
    expires_at: datetime = Field(description="After this no attempt starts any more.")
    cancel_requested_at: datetime | None
    created_at: datetime
    finished_at: datetime | None
    lateness_ms: float | None = Field(
        description="From scheduled_for to the first attempt's sending; null before it."
    )


class RunPage(Shown):
    runs: list[RunShown]
    next_cursor: str | None = NEXT_CURSOR


class AttemptShown(Shown):
    attempt: int
    outcome: str = Field(
        description="delivered, rejected, timed_out, unreachable, blocked, abandoned or lease_lost."
    )
    status_code: int | None
    maybe_delivered: bool = Field(description="True when the target may have acted on the request.")
    error: str | None
    schedule_version: int | None
    started_at: datetime | None
    finished_at: datetime
    connect_ms: float | None
    first_byte_ms: float | None
    total_ms: float | None
    request: JsonObject | None = Field(description="What was sent: method, url, headers, body_bytes.")
    response_headers: JsonObject | None
    response_excerpt: str | None
    worker: str


class AttemptList(Shown):
    attempts: list[AttemptShown]


class RunDetail(RunShown):
    attempts: list[AttemptShown] = Field(description="First to last.")


def show_run(run: RunRecord) -> RunShown:
    return RunShown(**_run_fields(run))


def show_run_detail(run: RunRecord, attempts: list[AttemptRecord]) -> RunDetail:
    return RunDetail(**_run_fields(run), attempts=[show_attempt(attempt) for attempt in attempts])


def _run_fields(run: RunRecord) -> JsonObject:
    return {
        "id": run.id,
        "schedule_id": run.schedule_id,
        "scheduled_for": run.scheduled_for,
        "status": run.status,
        "reason": run.reason,
        "origin": run.origin,
        "attempt": run.attempt,
        "max_attempts": run.max_attempts,
        "delivery_id": run.delivery_id,
        "schedule_version": run.schedule_version,
        "replay_of": run.replay_of,
        "fire_after": run.fire_after,
        "expires_at": run.expires_at,
        "cancel_requested_at": run.cancel_requested_at,
        "created_at": run.created_at,
        "finished_at": run.finished_at,
        "lateness_ms": _milliseconds(run.lateness),
    }


def show_attempt(attempt: AttemptRecord) -> AttemptShown:
    return AttemptShown(
        attempt=attempt.attempt,
        outcome=attempt.outcome,
        status_code=attempt.status_code,
        maybe_delivered=attempt.maybe_delivered,
        error=attempt.error,
        schedule_version=attempt.schedule_version,
        started_at=attempt.started_at,
        finished_at=attempt.finished_at,
        connect_ms=_milliseconds(attempt.connect),
        first_byte_ms=_milliseconds(attempt.first_byte),
        total_ms=_milliseconds(attempt.total),
        request=_object(attempt.request),
        response_headers=_object(attempt.response_headers),
        response_excerpt=attempt.response_excerpt,
        worker=attempt.worker,
    )


def _milliseconds(span: timedelta | None) -> float | None:
    return None if span is None else span / timedelta(milliseconds=1)


def _object(text: str | None) -> JsonObject | None:
    return None if text is None else json.loads(text)
