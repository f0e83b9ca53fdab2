"""The bounded wait of the tests."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.eventually import eventually

SHORT = timedelta(milliseconds=30)


async def test_it_returns_the_first_true_answer() -> None:
    answers = iter([0, None, "", "here", "later"])
    assert await eventually(lambda: next(answers)) == "here"


async def test_it_awaits_a_probe_that_is_a_coroutine() -> None:
    answers = iter([False, True])

    async def probe() -> bool:
        return next(answers)

    assert await eventually(probe)


async def test_a_failing_assertion_means_not_yet() -> None:
    answers = iter([1, 2, 3])

    def probe() -> int:
        answer = next(answers)
        assert answer == 3
        return answer

    assert await eventually(probe) == 3


async def test_after_the_limit_the_last_assertion_is_raised() -> None:
    def probe() -> bool:
        raise AssertionError("two rows are missing")

    with pytest.raises(AssertionError, match="two rows are missing"):
        await eventually(probe, within=SHORT)


async def test_after_the_limit_the_last_answer_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.03 s; the last answer was \[\]"):
        await eventually(list, within=SHORT)


async def test_another_exception_ends_the_wait_at_once() -> None:
    calls: list[int] = []

    def probe() -> bool:
        calls.append(1)
        raise LookupError("wrong question")

    with pytest.raises(LookupError):
        await eventually(probe)
    assert calls == [1]


async def test_it_asks_once_even_without_time() -> None:
    assert await eventually(lambda: True, within=timedelta(0))
