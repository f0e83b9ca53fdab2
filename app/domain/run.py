"""A run: the durable row of one occurrence, the lease that allows writing it, and what a settlement may say of it.

The state graph (stored statuses; "running" is not one of them, it is a live lease on an open run):

    pending --claim/retry--> retrying --…--> succeeded | failed | cancelled
    pending --claim/complete-----------------> succeeded

A `Lease` is the only value that the write verbs of `app.store.leases` accept, and only a claim makes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from app.domain.ids import DeliveryId, RunId, ScheduleId, TenantId
from app.domain.outcome import Outcome, Sent

MAX_ATTEMPTS = 8
"""The evidence ceiling of ADR 0033: attempt rows are numbered 1..8."""


class RunStatus(StrEnum):
    PENDING = "pending"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Origin(StrEnum):
    """Why a run exists."""

    SCHEDULE = "schedule"
    MANUAL = "manual"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class RunRef:
    """Enough to find a run's row in one partition, and to tell somebody that it exists."""

    id: RunId
    tenant_id: TenantId
    scheduled_for: datetime
    fire_after: datetime


@dataclass(frozen=True, slots=True)
class Lease:
    """The time-limited right to write one run.

    `token` is the row's `claimed_by`: new for every claim statement, so that a replica that lost a run and claimed
    it again cannot pass for its former self. `attempt` is the number this claim spent (1..8; none when `is_exhausted`).
    """

    ref: RunRef
    token: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A leased run with everything that admission needs; the target is looked up by (schedule, version).

    `granted_at` is the database's clock at the claim. `asked_at` and `answered_at` are CLOCK_BOOTTIME readings in
    seconds from before the claim was sent and after it was answered: the lease's local deadline counts from the first,
    the database's time goes on from the second.
    """

    lease: Lease
    schedule_id: ScheduleId
    schedule_version: int | None
    schedule_status: str | None
    origin: Origin
    delivery_id: DeliveryId
    max_attempts: int
    granted_at: datetime
    asked_at: float
    answered_at: float
    is_exhausted: bool
    is_expired: bool
    is_cancel_requested: bool


class Reason(StrEnum):
    """Why a run ended other than by its target's answer, or waits. The vocabulary of `job_run.reason`."""

    ATTEMPTS_SPENT = "attempts_spent"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    SCHEDULE_PAUSED = "schedule_paused"
    SCHEDULE_DELETED = "schedule_deleted"
    SCHEDULE_QUARANTINED = "schedule_quarantined"
    SUPERSEDED = "superseded"
    OVERLAP = "overlap"
    TARGET_UNUSABLE = "target_unusable"
    TARGET_BLOCKED = "target_blocked"
    NOT_RETRYABLE = "not_retryable"
    SETTLEMENT_REFUSED = "settlement_refused"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one attempt did, for its `run_attempt` row. Written in the same statement as the run it belongs to."""

    outcome: Outcome
    sent: Sent | None
    schedule_version: int
    started_at: datetime
    finished_at: datetime
    worker: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The target took it: the run has succeeded."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Another attempt after `delay`; this one is spent."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Fail:
    """The run has failed for good."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Cancel:
    """The run is cancelled by its owner; nothing more will be sent."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Defer:
    """Nothing was sent; try again after `delay`. The attempt is given back."""

    delay: timedelta
    reason: Reason


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing was sent and nothing stands in the way: give the run back at once, attempt included."""


Settlement = Complete | Retry | Fail | Cancel | Defer | Release


@dataclass(frozen=True, slots=True)
class Settled:
    """One settlement ready to be written: the lease that allows it, what it says, and the attempt's evidence.

    `evidence` is None exactly when no attempt was made (refused before sending, deferred, released).
    """

    lease: Lease
    settlement: Settlement
    evidence: Evidence | None
