"""What follows from an outcome: done, another attempt and when, or failed for good. Pure; the table is in
docs/delivery.md.

    Delivered (200..299)            complete
    Rejected 410 Gone               fail: not_retryable (the receiver asks never to be called again)
    Rejected, any other status      retry; `Retry-After` is honoured
    TimedOut, Unreachable           retry
    Blocked                         fail: target_blocked (the same address policy would refuse it again)
    Abandoned, maybe delivered      retry soon: the target did nothing wrong
    Abandoned, nothing left         release: not an attempt
    a retry on the last attempt     fail: attempts_spent

Every other non-2xx is retried, client errors and redirects too: 401, 404 and 308 are what a deployment in
progress looks like, and a scheduler that gives up on the first of them loses the occurrence. Standard
Webhooks says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from random import Random
from typing import assert_never

from app.domain.outcome import Abandoned, Blocked, Delivered, Outcome, Rejected, TimedOut, Unreachable
from app.domain.retry_after import LONGEST, asked_delay
from app.domain.run import MAX_ATTEMPTS, Complete, Fail, Reason, Release, Retry
from app.errors import InvalidInput

SHORTEST = timedelta(seconds=1)
"""No retry comes sooner, whatever the jitter says."""

GONE = 410
_FIELDS = ("max_attempts", "base_seconds", "factor", "cap_seconds")
_LONGEST_SECONDS = LONGEST.total_seconds()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a run is tried: before attempt n + 1 at most min(cap, base × factor^(n-1))
    passes."""

    max_attempts: int = 5
    base: timedelta = timedelta(seconds=10)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)


DEFAULT = RetryPolicy()


def parse(data: Mapping[str, object]) -> RetryPolicy:
    """Read a policy as the API takes it; what is left out has its default.

    Raises InvalidInput naming the field (`retry.max_attempts`, `retry.base_seconds`, …).
    """
    for name in data:
        if name not in _FIELDS:
            raise InvalidInput(
                "retry", f"has an unknown field {ascii(name)[:60]}; allowed: {', '.join(_FIELDS)}"
            )
    attempts = data.get("max_attempts", DEFAULT.max_attempts)
    if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= MAX_ATTEMPTS:
        raise InvalidInput("retry.max_attempts", f"must be a whole number from 1 to {MAX_ATTEMPTS}")
    base = _number(data, "base_seconds", DEFAULT.base.total_seconds(), 1, _LONGEST_SECONDS)
    factor = _number(data, "factor", DEFAULT.factor, 1, 10)
    cap = _number(data, "cap_seconds", max(base, DEFAULT.cap.total_seconds()), 1, _LONGEST_SECONDS)
    if cap < base:
        raise InvalidInput("retry.cap_seconds", f"must not be below retry.base_seconds ({base:g})")
    return RetryPolicy(
        max_attempts=attempts, base=timedelta(seconds=base), factor=factor, cap=timedelta(seconds=cap)
    )


def to_json(policy: RetryPolicy) -> str:
    """The text for `schedule.retry`."""
    return json.dumps(
        {
            "max_attempts": policy.max_attempts,
            "base_seconds": policy.base.total_seconds(),
            "factor": policy.factor,
            "cap_seconds": policy.cap.total_seconds(),
        }
    )


@lru_cache(maxsize=4096)
def from_json(text: str) -> RetryPolicy:
    """Read what `to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    data = json.loads(text)
    return RetryPolicy(
        max_attempts=int(data["max_attempts"]),
        base=timedelta(seconds=float(data["base_seconds"])),
        factor=float(data["factor"]),
        cap=timedelta(seconds=float(data["cap_seconds"])),
    )


def backoff(policy: RetryPolicy, attempt: int, rng: Random) -> timedelta:
    """The wait after attempt number `attempt` (1 is the first): exponential with full jitter.

    At least the smaller of `SHORTEST` and the cap, at most the cap, for any numbers: nothing is computed that
    could overflow, and an attempt number beyond the ceiling counts as a large one.
    """
    cap = policy.cap.total_seconds()
    ceiling = min(policy.base.total_seconds(), cap)
    for _ in range(min(attempt, 64) - 1):
        if ceiling >= cap:
            break
        ceiling *= policy.factor
    ceiling = min(ceiling, cap)
    floor = min(SHORTEST.total_seconds(), cap)
    return timedelta(seconds=max(rng.random() * ceiling, floor))


def decide(
    outcome: Outcome,
    *,
    attempt: int,
    policy: RetryPolicy,
    rng: Random,
    now: datetime,
    max_attempts: int | None = None,
) -> Complete | Retry | Fail | Release:
    """What `outcome` of attempt number `attempt` means for its run.

    `max_attempts` is the run's own ceiling where it differs from the policy's (the schedule was edited
    since).
    """
    last = attempt >= min(max_attempts or policy.max_attempts, MAX_ATTEMPTS)
    match outcome:
        case Delivered():
            return Complete()
        case Blocked():
            return Fail(Reason.TARGET_BLOCKED)
        case Rejected() if outcome.answer.status == GONE:
            return Fail(Reason.NOT_RETRYABLE)
        case Abandoned() if not outcome.is_maybe_delivered:
            return Release()
        case Rejected() | TimedOut() | Unreachable() | Abandoned():
            return Fail(Reason.ATTEMPTS_SPENT) if last else Retry(_delay(outcome, attempt, policy, rng, now))
        case _:
            assert_never(outcome)


def _delay(
    outcome: Rejected | TimedOut | Unreachable | Abandoned,
    attempt: int,
    policy: RetryPolicy,
    rng: Random,
    now: datetime,
) -> timedelta:
    if isinstance(outcome, Abandoned):
        return SHORTEST + SHORTEST * rng.random()
    own = backoff(policy, attempt, rng)
    asked = asked_delay(outcome.answer.headers, now) if isinstance(outcome, Rejected) else None
    if asked is None:
        return own
    # Up to a tenth later than asked, so that all who were turned away together do not come back together.
    return min(max(own, asked + asked * (rng.random() / 10)), LONGEST)


def _number(data: Mapping[str, object], name: str, default: float, low: float, high: float) -> float:
    value = data.get(name, default)
    # NaN is outside every range, and an integer too large for a float is still compared exactly.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidInput(f"retry.{name}", f"must be a number from {low:g} to {high:g}")
    return float(value)
