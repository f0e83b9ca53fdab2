"""The shared timer keeps the rules of `asyncio.timeout`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from app.executor.deadline import Deadline, Deadlines
from tests.eventually import eventually

ON_BOTH_LOOPS = True

NEVER = timedelta(days=1)
NOW = timedelta()


async def wait_for_ever(deadline: Deadline) -> None:
    with deadline:
        await asyncio.Event().wait()


async def test_what_runs_past_its_deadline_ends_as_a_timeout() -> None:
    late = Deadlines().within(NOW)
    with pytest.raises(TimeoutError):
        await wait_for_ever(late)
    assert late.is_expired
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_only_the_late_ones_end() -> None:
    deadlines = Deadlines()
    patient = asyncio.create_task(wait_for_ever(deadlines.within(NEVER)))
    with pytest.raises(TimeoutError):
        await wait_for_ever(deadlines.within(NOW))
    assert not patient.done()
    patient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patient
    deadlines.close()


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    deadlines = Deadlines()
    deadline = deadlines.within(NEVER)
    task = asyncio.create_task(wait_for_ever(deadline))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not deadline.is_expired
    deadlines.close()


async def test_a_cancellation_together_with_the_deadline_stays_a_cancellation() -> None:
    deadlines = Deadlines()
    deadline = deadlines.within(NEVER)
    task = asyncio.create_task(wait_for_ever(deadline))
    await asyncio.sleep(0)
    deadline.expire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadlines.close()


async def test_an_exception_of_the_operation_comes_through() -> None:
    deadlines = Deadlines()
    with pytest.raises(ZeroDivisionError), deadlines.within(NEVER):
        raise ZeroDivisionError
    deadlines.close()


async def test_a_second_deadline_inside_the_first_ends_alone() -> None:
    deadlines = Deadlines()
    with deadlines.within(NEVER) as outer:
        with pytest.raises(TimeoutError):
            await wait_for_ever(deadlines.within(NOW))
        assert not outer.is_expired
    deadlines.close()


async def test_the_timer_stops_when_nothing_runs() -> None:
    deadlines = Deadlines()
    with deadlines.within(NEVER):
        assert deadlines._timer is not None
    await eventually(lambda: deadlines._timer is None)
    with deadlines.within(NEVER):
        assert deadlines._timer is not None
    deadlines.close()
