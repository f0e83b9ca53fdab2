"""What one attempt did, as data. Exceptions are for our own faults; a target can only cause an outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class Sent:
    """The request as it really left (or would have left); sensitive header values are masked already."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's answer, made safe for storage: no NUL, no surrogates, excerpt capped."""

    status: int
    headers: tuple[tuple[str, str], ...]
    excerpt: str
    truncated: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """Phases of one attempt, each from its start; None for a phase that was not reached.

    `connect`: until the connection was ready for the request (name, TCP and TLS; next to nothing when one was
    reused), so the first byte left at start + `connect`. `first_byte`: until the answer's head was complete.
    """

    connect: timedelta | None = None
    first_byte: timedelta | None = None
    total: timedelta = timedelta()


@dataclass(frozen=True, slots=True)
class Delivered:
    """Answered with a status that counts as success."""

    answer: Answer
    timing: Timing


@dataclass(frozen=True, slots=True)
class Rejected:
    """Answered with a status that counts as failure (3xx included: redirects are never followed)."""

    answer: Answer
    timing: Timing


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline of the whole attempt passed. `is_maybe_delivered` when the request may have left.

    `phase` is where it passed: `dns`, `connect` (TCP and TLS), `answer` (the request was handed over and its
    answer's head was not complete), `body` (of the answer).
    """

    phase: str
    is_maybe_delivered: bool
    timing: Timing


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No usable answer: refused, unresolvable, TLS failure, connection lost, malformed answer.

    `error` names the class (`dns`, `connect`, `tls`, `disconnected`, `protocol`, `too_large`, or `local` when
    this replica had no socket left); `detail` is safe text without resolved addresses of ours.
    """

    error: str
    detail: str
    is_maybe_delivered: bool
    timing: Timing


@dataclass(frozen=True, slots=True)
class Blocked:
    """The guard refused the target's address or URL. Nothing was sent."""

    detail: str
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """We gave up ourselves (drain, cancel, lease lost) while the request may have been on its way."""

    detail: str
    is_maybe_delivered: bool
    timing: Timing = field(default_factory=Timing)


Outcome = Delivered | Rejected | TimedOut | Unreachable | Blocked | Abandoned


def judge(answer: Answer, timing: Timing) -> Delivered | Rejected:
    """A complete answer is a success exactly when its status is 200 to 299."""
    if 200 <= answer.status <= 299:
        return Delivered(answer, timing)
    return Rejected(answer, timing)


def name_of(outcome: Outcome) -> str:
    """The word stored in `run_attempt.outcome` (`delivered`, `rejected`, `timed_out`, …)."""
    return _NAMES[type(outcome)]


_NAMES: dict[type, str] = {
    Delivered: "delivered",
    Rejected: "rejected",
    TimedOut: "timed_out",
    Unreachable: "unreachable",
    Blocked: "blocked",
    Abandoned: "abandoned",
}


def is_maybe_delivered(outcome: Outcome) -> bool:
    """True when the target may have acted on the request although it was not seen to succeed."""
    match outcome:
        case Delivered() | Rejected():
            return True
        case TimedOut() | Unreachable() | Abandoned():
            return outcome.is_maybe_delivered
        case Blocked():
            return False
