"""One tenant's crowd or dead target does not delay the others: the order of arrival is the judge."""

from __future__ import annotations

import signal
from datetime import timedelta
from uuid import UUID

import pytest

from app.local.answers import Hang
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.system import evidence
from tests.system.replicas import Fleet
from tests.system.seeding import seed_due, soon

HEAVY = 50_000
LIGHT = 999
SLOTS = 50
LIGHT_WITHIN = timedelta(seconds=120)


@pytest.mark.parametrize("replicas", [("one",), ("one", "two")], ids=["one replica", "two replicas"])
async def test_tenants_with_one_run_wait_one_round_and_not_for_a_crowd(
    fleet: Fleet, db: Connection, receiver: Receiver, replicas: tuple[str, ...]
) -> None:
    due_since = await soon(db, ahead=-timedelta(minutes=1))
    [heavy] = await seed_due(
        db, tenants=1, each=HEAVY, url=f"{receiver.url}/heavy", due_since=due_since, first_tenant=500
    )
    # The crowd is older, and its tenant stands in the middle of the others.
    later = due_since + timedelta(seconds=1)
    await seed_due(db, tenants=499, each=1, url=f"{receiver.url}/light", due_since=later)
    await seed_due(
        db, tenants=LIGHT - 499, each=1, url=f"{receiver.url}/light", due_since=later, first_tenant=501
    )
    assert heavy == UUID(int=500)

    # A round gives every tenant one turn. What is claimed at once before backlog is noticed, and one turn more
    # for every tenant's run that another replica has taken, is all that may come before.
    bound = len(replicas) * SLOTS + 2 * (LIGHT + 1)
    seen = _Places(receiver)
    fleet.settings["SCHEDULER_EXECUTOR_SLOTS"] = str(SLOTS)
    await fleet.start(*replicas)
    await receiver.wait_until(
        lambda: len(receiver.received) > bound or seen.light() == LIGHT, timeout=LIGHT_WITHIN
    )
    assert seen.light() == LIGHT, f"{seen.light()} of {LIGHT} among the first {bound} deliveries"
    assert seen.heavy() > 0, "the crowd has its turns as well"
    fleet.kill()
    assert set(evidence.arrivals(receiver.received).values()) == {1}


class _Places:
    """Counts what has arrived, looking at each request once."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._looked_at = 0
        self._light = 0

    def light(self) -> int:
        ledger = self._receiver.received
        self._light += sum(received.path == "/light" for received in ledger[self._looked_at :])
        self._looked_at = len(ledger)
        return self._light

    def heavy(self) -> int:
        return len(self._receiver.received) - self.light()


async def test_hanging_targets_fill_their_tenants_cap_and_nobody_elses_slots(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    slots, hanging, others, each = 20, 500, 20, 20
    cap = slots // 2
    receiver.answer("/hang", Hang())
    due_since = await soon(db, ahead=-timedelta(minutes=1))
    await seed_due(db, tenants=1, each=hanging, url=f"{receiver.url}/hang", due_since=due_since)
    later = due_since + timedelta(seconds=1)
    await seed_due(db, tenants=others, each=each, url=f"{receiver.url}/fine", due_since=later, first_tenant=2)
    [replica] = await fleet.start(
        "only",
        executor_slots=str(slots),
        executor_delivery_timeout="5m",  # no hanging request ends before this test
        executor_drain_grace="6m",
    )
    await receiver.wait_until(lambda: len(receiver.received) >= cap + others * each)
    await evidence.all_ended_but(db, hanging)

    arrived = [received.path for received in receiver.received]
    assert arrived.count("/fine") == others * each
    assert arrived.count("/hang") == cap, "the cap, no more and no less"
    assert await evidence.statuses(db) == {"succeeded": others * each, "pending": hanging}

    replica.send(signal.SIGTERM)
    await replica.saw("drain.begun")
    replica.send(signal.SIGTERM)
    assert await replica.ended() == 0
    assert await evidence.statuses(db) == {
        "succeeded": others * each,
        "retrying": cap,
        "pending": hanging - cap,
    }
