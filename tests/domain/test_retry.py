"""Back-off never overflows, never hurries, never exceeds its cap; each outcome has one consequence."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.outcome import (
    Abandoned,
    Answer,
    Blocked,
    Delivered,
    Outcome,
    Rejected,
    TimedOut,
    Timing,
    Unreachable,
    judge,
)
from app.domain.retry import DEFAULT, SHORTEST, RetryPolicy, backoff, decide, from_json, parse, to_json
from app.domain.retry_after import LONGEST
from app.domain.run import MAX_ATTEMPTS, Complete, Fail, Reason, Release, Retry
from app.errors import InvalidInput

NOW = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)
TIMING = Timing()


def answered(status: int, *headers: tuple[str, str]) -> Outcome:
    return judge(Answer(status, headers, "", truncated=False), TIMING)


def decided(
    outcome: Outcome,
    attempt: int = 1,
    policy: RetryPolicy = DEFAULT,
    seed: int = 1,
    max_attempts: int | None = None,
) -> Complete | Retry | Fail | Release:
    return decide(
        outcome, attempt=attempt, policy=policy, rng=Random(seed), now=NOW, max_attempts=max_attempts
    )


durations = st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta.max)


@given(
    st.builds(
        RetryPolicy,
        max_attempts=st.integers(1, 8),
        base=durations,
        factor=st.floats(0, allow_nan=False),
        cap=durations,
    ),
    st.integers(-(10**6), 10**6),
    st.integers(),
)
def test_backoff_is_positive_finite_and_within_its_cap_for_any_numbers(
    policy: RetryPolicy, attempt: int, seed: int
) -> None:
    delay = backoff(policy, attempt, Random(seed))
    assert timedelta() < delay
    # A float has no more digits: the longest timedeltas are whole microseconds only to a few seconds.
    assert delay.total_seconds() <= policy.cap.total_seconds()


@pytest.mark.parametrize("attempt", [0, 1, 16, 39, 40, 41, 63, 64, 65, 1023, 10**9])
@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0, 10.0])
def test_backoff_grows_to_its_cap_and_stays_there(attempt: int, factor: float) -> None:
    policy = RetryPolicy(base=timedelta(seconds=5), factor=factor, cap=timedelta(hours=1))
    delays = [backoff(policy, attempt, Random(seed)) for seed in range(300)]
    ceiling = min(5 * factor ** min(max(attempt, 1) - 1, 60), 3600)
    assert max(delays) <= timedelta(seconds=ceiling)
    assert max(delays) > timedelta(seconds=ceiling * 0.9)
    assert min(delays) >= SHORTEST


def test_backoff_is_jittered_over_its_whole_range() -> None:
    delays = sorted(backoff(DEFAULT, 4, Random(seed)).total_seconds() for seed in range(1000))
    ceiling = 80
    assert delays[100] < 0.2 * ceiling
    assert 0.4 * ceiling < delays[500] < 0.6 * ceiling
    assert delays[900] > 0.8 * ceiling


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_every_2xx_completes_the_run(status: int) -> None:
    assert decided(answered(status), attempt=8) == Complete()


@pytest.mark.parametrize(
    "status",
    [
        *(0, 100, 101, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 405, 408, 409, 413, 418, 422, 425),
        *(429, 451, 499, 500, 501, 502, 503, 504, 505, 599, 600, 999),
    ],
)
def test_every_other_answer_is_tried_again_until_the_attempts_are_spent(status: int) -> None:
    assert isinstance(decided(answered(status)), Retry)
    assert isinstance(decided(answered(status), attempt=DEFAULT.max_attempts - 1), Retry)
    assert decided(answered(status), attempt=DEFAULT.max_attempts) == Fail(Reason.ATTEMPTS_SPENT)


def test_gone_is_for_good() -> None:
    assert decided(answered(410)) == Fail(Reason.NOT_RETRYABLE)


@pytest.mark.parametrize("maybe", [True, False])
def test_no_answer_is_tried_again_until_the_attempts_are_spent(maybe: bool) -> None:
    for outcome in (
        TimedOut("answer", maybe, TIMING),
        Unreachable("dns", "the name does not exist", maybe, TIMING),
        Unreachable("local", "no files", maybe, TIMING),
    ):
        assert isinstance(decided(outcome), Retry)
        assert decided(outcome, attempt=5) == Fail(Reason.ATTEMPTS_SPENT)


def test_a_blocked_target_is_not_tried_again() -> None:
    assert decided(Blocked("not allowed")) == Fail(Reason.TARGET_BLOCKED)


def test_an_abandoned_attempt_is_spent_only_if_its_request_may_have_left() -> None:
    assert decided(Abandoned("drain", is_maybe_delivered=False), attempt=8) == Release()
    soon = decided(Abandoned("drain", is_maybe_delivered=True))
    assert isinstance(soon, Retry)
    assert SHORTEST <= soon.delay <= 2 * SHORTEST
    assert decided(Abandoned("drain", is_maybe_delivered=True), attempt=5) == Fail(Reason.ATTEMPTS_SPENT)


def test_the_runs_own_ceiling_counts_where_it_differs_from_the_policys() -> None:
    assert decided(answered(500), attempt=3, max_attempts=3) == Fail(Reason.ATTEMPTS_SPENT)
    assert isinstance(decided(answered(500), attempt=5, max_attempts=8), Retry)
    eternal = RetryPolicy(max_attempts=10**6)
    assert decided(answered(500), attempt=MAX_ATTEMPTS, policy=eternal) == Fail(Reason.ATTEMPTS_SPENT)


@pytest.mark.parametrize("status", [302, 404, 429, 500, 503])
def test_retry_after_is_honoured_a_little_later_than_asked(status: int) -> None:
    delays = []
    for seed in range(50):
        retry = decided(answered(status, ("retry-after", "600")), seed=seed)
        assert isinstance(retry, Retry)
        delays.append(retry.delay)
    assert all(timedelta(seconds=600) <= delay <= timedelta(seconds=660) for delay in delays)
    assert len(set(delays)) > 40


@pytest.mark.parametrize(
    "value", ["0", "-5", "+5", "5.5", "1e3", "５", "", "soon", "Sun, 06 Nov 1994 08:49:37 GMT"]
)
def test_our_own_backoff_holds_where_retry_after_asks_for_nothing_more(value: str) -> None:
    for seed in range(20):
        retry = decided(answered(503, ("retry-after", value)), attempt=3, seed=seed)
        assert retry == decided(answered(503), attempt=3, seed=seed) or (
            value == "0" and isinstance(retry, Retry) and retry.delay == backoff(DEFAULT, 3, Random(seed))
        )


@pytest.mark.parametrize("value", ["9999999999", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_huge_retry_after_is_clamped(value: str) -> None:
    assert decided(answered(429, ("retry-after", value))) == Retry(LONGEST)


@given(
    st.integers(0, 999),
    st.text(max_size=40) | st.from_regex(r"[0-9]{1,500}", fullmatch=True),
    st.integers(1, 8),
    st.integers(),
)
def test_every_rejection_has_a_consequence_that_the_database_can_hold(
    status: int, retry_after: str, attempt: int, seed: int
) -> None:
    decision = decided(answered(status, ("retry-after", retry_after)), attempt=attempt, seed=seed)
    if isinstance(decision, Retry):
        assert timedelta() < decision.delay <= LONGEST
        assert NOW + decision.delay > NOW


def test_a_policy_is_read_with_its_defaults() -> None:
    assert parse({}) == DEFAULT
    assert parse({"max_attempts": 1, "base_seconds": 2.5, "factor": 1, "cap_seconds": 2.5}) == RetryPolicy(
        1, timedelta(seconds=2.5), 1.0, timedelta(seconds=2.5)
    )
    assert parse({"base_seconds": 7200}).cap == timedelta(hours=2)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"max_attempts": 0}, "retry.max_attempts"),
        ({"max_attempts": 9}, "retry.max_attempts"),
        ({"max_attempts": 1.0}, "retry.max_attempts"),
        ({"max_attempts": True}, "retry.max_attempts"),
        ({"max_attempts": "3"}, "retry.max_attempts"),
        ({"max_attempts": None}, "retry.max_attempts"),
        ({"base_seconds": 0}, "retry.base_seconds"),
        ({"base_seconds": 0.5}, "retry.base_seconds"),
        ({"base_seconds": 86_401}, "retry.base_seconds"),
        ({"base_seconds": math.nan}, "retry.base_seconds"),
        ({"base_seconds": math.inf}, "retry.base_seconds"),
        ({"base_seconds": 10**400}, "retry.base_seconds"),
        ({"base_seconds": True}, "retry.base_seconds"),
        ({"factor": 0.9}, "retry.factor"),
        ({"factor": 10.1}, "retry.factor"),
        ({"factor": "2"}, "retry.factor"),
        ({"cap_seconds": 86_401}, "retry.cap_seconds"),
        ({"base_seconds": 10, "cap_seconds": 9}, "retry.cap_seconds"),
        ({"attempts": 3}, "retry"),
    ],
)
def test_a_policy_outside_its_bounds_is_refused_by_field(data: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(data)
    assert caught.value.field == field


@given(st.integers(1, 8), st.floats(1, 86_400), st.floats(1, 10), st.floats(1, 86_400))
def test_a_policy_that_is_stored_comes_back(attempts: int, base: float, factor: float, cap: float) -> None:
    policy = parse(
        {"max_attempts": attempts, "base_seconds": base, "factor": factor, "cap_seconds": max(base, cap)}
    )
    assert from_json(to_json(policy)) == policy
    assert set(json.loads(to_json(policy))) == {"max_attempts", "base_seconds", "factor", "cap_seconds"}


def test_delivered_and_rejected_are_told_apart_by_status_alone() -> None:
    assert [status for status in range(1000) if isinstance(answered(status), Delivered)] == list(
        range(200, 300)
    )
    assert isinstance(answered(199), Rejected)
