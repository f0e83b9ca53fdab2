from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

from app.claim.load import TenantLoad
from app.domain.ids import TenantId

ONE, TWO = (TenantId(UUID(int=number)) for number in (1, 2))
LONG = timedelta(hours=1)


def test_slots_and_room_are_what_is_not_in_flight() -> None:
    load = TenantLoad(slots=5, cap=3)
    assert (load.idle, load.in_flight, load.least_room()) == (5, 0, 3)
    for tenant in (ONE, ONE, TWO):
        load.take(tenant)
    assert (load.idle, load.in_flight) == (2, 3)
    assert (load.room(ONE), load.room(TWO), load.least_room()) == (1, 2, 1)
    for tenant in (ONE, TWO, ONE):
        load.give(tenant)
    assert (load.idle, load.room(ONE), load.least_room()) == (5, 3, 3)


@pytest.fixture
def stop() -> asyncio.Event:
    return asyncio.Event()


async def test_a_tenant_that_comes_off_its_cap_ends_the_wait_for_room(stop: asyncio.Event) -> None:
    load = TenantLoad(slots=9, cap=2)
    load.take(ONE)
    load.take(ONE)
    waiting = asyncio.create_task(load.room_again(at_most=LONG, stop=stop))
    await asyncio.sleep(0)
    load.give(ONE)
    await waiting


async def test_a_tenant_below_its_cap_does_not_end_the_wait_for_room(stop: asyncio.Event) -> None:
    load = TenantLoad(slots=9, cap=2)
    load.take(ONE)
    load.give(ONE)
    await load.room_again(at_most=timedelta(milliseconds=1), stop=stop)
    waiting = asyncio.create_task(load.room_again(at_most=LONG, stop=stop))
    load.take(TWO)
    load.give(TWO)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    stop.set()
    await waiting


async def test_room_that_came_before_the_wait_is_not_forgotten(stop: asyncio.Event) -> None:
    load = TenantLoad(slots=9, cap=1)
    load.take(ONE)
    load.give(ONE)
    await load.room_again(at_most=LONG, stop=stop)


async def test_a_slot_given_back_ends_the_wait_for_one(stop: asyncio.Event) -> None:
    load = TenantLoad(slots=1, cap=1)
    load.take(ONE)
    waiting = asyncio.create_task(load.slot_freed(at_most=LONG, stop=stop))
    await asyncio.sleep(0)
    load.give(ONE)
    await waiting


async def test_the_stop_ends_both_waits(stop: asyncio.Event) -> None:
    load = TenantLoad(slots=1, cap=1)
    waits = asyncio.gather(load.slot_freed(at_most=LONG, stop=stop), load.room_again(at_most=LONG, stop=stop))
    stop.set()
    await waits
