"""What both claim strategies must keep, seen from outside: two replicas, in postgres mode, and in kafka mode on every
broker there is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from app.claim.grant import Grants
from app.domain.run import ClaimedRun, Defer, Reason, Settled
from app.local.answers import Reply
from app.local.receiver import Receiver
from app.store import claims, leases
from app.store.pool import Connection, Pool
from tests import brokers as broker_kinds
from tests.brokers import BrokerPlace, Brokers, BrokerServer, place_on
from tests.eventually import eventually
from tests.system import evidence
from tests.system.kafka.disturbance import Disturbance, disturbed
from tests.system.kafka.modes import SWEEP, all_receive, figures, kafka_mode
from tests.system.replicas import Fleet, Replica
from tests.system.seeding import seed_due, seed_one_offs, soon

POSTGRES = "postgres"


@dataclass(frozen=True, slots=True)
class Mode:
    """A claim strategy with all it needs; `place` is None in postgres mode."""

    place: BrokerPlace | None

    async def start(self, fleet: Fleet, *names: str, **settings: str) -> list[Replica]:
        """Replicas that are ready, and in kafka mode receive."""
        if self.place is not None:
            settings |= kafka_mode(self.place, grace=GRACE)
        replicas = await fleet.start(*names, **settings)
        if self.place is not None:
            await all_receive(*replicas)
        return replicas


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode_server" in metafunc.fixturenames:
        modes = [POSTGRES, *broker_kinds.names()]
        metafunc.parametrize("mode_server", modes, indirect=True, scope="session")


@pytest.fixture(scope="session")
def mode_server(request: pytest.FixtureRequest, brokers: Brokers) -> BrokerServer | None:
    """The broker of the mode, shared with other tests; none in postgres mode."""
    return None if request.param == POSTGRES else brokers.get(request.param)


@pytest.fixture
def mode(mode_server: BrokerServer | None) -> Mode:
    """Each strategy in turn, kafka mode on each broker, with a topic and a group of the test's own."""
    return Mode(None if mode_server is None else place_on(mode_server))


GRACE = timedelta(seconds=4)
RUNS = 10_000
UNHINTED = 200
TENANTS = 50
SLOTS = 60
CAP = 30
AHEAD = timedelta(seconds=9)
BURST_WITHIN = timedelta(seconds=200)


async def test_ten_thousand_due_runs_are_each_delivered_exactly_once_within_slots_and_caps(
    fleet: Fleet, dsn: str, pool: Pool, db: Connection, receiver: Receiver, mode: Mode
) -> None:
    """In kafka mode the planner's hints for all runs arrive; so do all of them again and again, from us, beside hints
    that are stale, early, foreign or no hints at all. And 200 due runs have no hint: it was lost."""
    receiver.answer("/", Reply(delay=timedelta(milliseconds=20)))
    replicas = await mode.start(fleet, "one", "two", executor_slots=str(SLOTS))
    at = await soon(db, ahead=AHEAD)
    await seed_one_offs(db, RUNS, url=f"{receiver.url}/burst", at=at, tenants=TENANTS)
    async with evidence.watched_leases(dsn) as most_leases, _trouble(pool, mode) as disturbance:
        await seed_due(
            db,
            tenants=2,
            each=UNHINTED // 2,
            url=f"{receiver.url}/lost",
            due_since=await soon(db),
            first_tenant=TENANTS + 1,
        )
        await receiver.wait_for(RUNS + UNHINTED, timeout=BURST_WITHIN)
        await evidence.all_ended(db, runs=RUNS + UNHINTED)

    assert await evidence.statuses(db) == {"succeeded": RUNS + UNHINTED}
    found = await evidence.attempts(db)
    assert len(found) == RUNS + UNHINTED
    assert {(attempt.number, attempt.outcome) for attempt in found} == {(1, "delivered")}
    arrived = evidence.arrivals(receiver.received)
    assert set(arrived.values()) == {1}
    assert set(arrived) == await evidence.delivery_ids(db)
    assert (
        await db.fetchval("SELECT count(*) FROM schedule WHERE name LIKE 'one-off%' AND status <> 'finished'")
        == 0
    )

    busiest = await evidence.busiest(db)
    assert set(busiest) == {"one", "two"}, "both replicas took their part"
    assert max(busiest.values()) <= SLOTS
    assert set(most_leases) == {"one", "two"}
    assert max(most_leases.values()) <= SLOTS
    assert await _busiest_tenant(db) <= CAP
    if disturbance is not None:
        await _judged_by_the_database(replicas, disturbance)


async def _judged_by_the_database(replicas: list[Replica], disturbance: Disturbance) -> None:
    """What was no hint was passed over, what was one claimed each run once at the most, the sweep had the rest."""
    assert disturbance.malformed > 0
    assert disturbance.told > 0

    async def all_passed_over() -> bool:
        counted = await figures(replicas)
        assert counted["hints malformed"] >= disturbance.malformed, counted
        return True

    await eventually(all_passed_over)
    counted = await figures(replicas)
    assert counted["hints sent"] == RUNS
    assert counted["claimed_runs"] == RUNS + UNHINTED
    assert counted["hints claimed"] > 0
    assert counted["claimed_runs"] - counted["hints claimed"] >= UNHINTED


@contextlib.asynccontextmanager
async def _trouble(pool: Pool, mode: Mode) -> AsyncIterator[Disturbance | None]:
    if mode.place is None:
        yield None
    else:
        async with disturbed(pool, mode.place) as disturbance:
            yield disturbance


async def _busiest_tenant(conn: Connection) -> int:
    """The most attempts that one tenant had under way on one replica at one instant, by their evidence."""
    found: int = await conn.fetchval(
        """SELECT max(under_way)
             FROM (SELECT sum(step) OVER (PARTITION BY worker, tenant_id ORDER BY at, step) AS under_way
                     FROM run_attempt
                    CROSS JOIN LATERAL (VALUES (started_at, 1), (finished_at, -1)) AS edge(at, step)) AS walk"""
    )
    return found


FEW_SLOTS = 10
SLOW = timedelta(milliseconds=400)
FIRST = 75
"""Due at once, so that everybody has something to wait for from the beginning."""
PER_SECOND = 46
"""With what was put off, about what two replicas of so many slots can deliver at the most: 50 a second. So few
that also a busy machine can."""
FLAKY = 4
"""Of each second's, so many fail at first."""
SECONDS = 9
PUT_OFF = 30
BUSY = 15
FEW = 5
"""Tenants: those whose new runs fill every slot, and those with runs that fail or were put off."""
MARGIN = timedelta(seconds=4)
"""For a round of the tenants, and a machine that is busy with all of this at once."""


async def test_retries_and_deferred_runs_start_in_time_while_new_runs_fill_every_slot(
    fleet: Fleet, db: Connection, receiver: Receiver, mode: Mode
) -> None:
    receiver.answer("/steady", Reply(delay=SLOW))
    receiver.answer_each("/flaky", Reply(status=503, delay=SLOW), Reply(delay=SLOW))
    replicas = await mode.start(fleet, "one", "two", executor_slots=str(FEW_SLOTS))
    begins_at = await soon(db, ahead=timedelta(seconds=4))
    for second in range(SECONDS):
        at = begins_at + timedelta(seconds=second)
        steady = PER_SECOND - FLAKY + (0 if second else FIRST)
        await seed_one_offs(db, steady, url=f"{receiver.url}/steady", at=at, tenants=BUSY)
        await seed_one_offs(db, FLAKY, url=f"{receiver.url}/flaky", at=at, tenants=FEW, first_tenant=BUSY + 1)
    put_off = await _put_off(
        db,
        f"{receiver.url}/steady",
        start=begins_at + timedelta(seconds=1),
        end=begins_at + timedelta(seconds=SECONDS - 1),
    )
    runs = FIRST + PER_SECOND * SECONDS + PUT_OFF
    await receiver.wait_for(runs + FLAKY * SECONDS, timeout=BURST_WITHIN)
    await evidence.all_ended(db, runs=runs)

    assert await evidence.statuses(db) == {"succeeded": runs}
    found = await evidence.attempts(db)
    assert {(one.number, one.outcome) for one in found} == {
        (1, "delivered"),
        (1, "rejected"),
        (2, "delivered"),
    }
    assert evidence.same_number_twice(receiver.received) == set()
    waited = await _waits(db, put_off)
    assert len(waited["retry"]) == FLAKY * SECONDS
    assert len(waited["deferred"]) == PUT_OFF
    assert sorted(waited["first"])[len(waited["first"]) // 10] > SLOW / 2, "there was always somebody waiting"
    bound = MARGIN if mode.place is None else GRACE + SWEEP + MARGIN
    for kind in ("retry", "deferred"):
        assert max(waited[kind]) < bound
        assert sorted(waited[kind])[len(waited[kind]) // 2] < bound - MARGIN / 2
    if mode.place is not None:
        counted = await figures(replicas)
        assert counted["hints claimed"] > runs // 2, "hints filled the slots"


async def _put_off(conn: Connection, url: str, *, start: datetime, end: datetime) -> list[ClaimedRun]:
    """Runs that were claimed and deferred, to instants all over the span. In one transaction: nobody sees them due."""
    async with conn.transaction():
        await seed_due(
            conn,
            tenants=FEW,
            each=PUT_OFF // FEW,
            url=url,
            due_since=await soon(conn),
            first_tenant=BUSY + 1,
        )
        now: datetime = await conn.fetchval("SELECT now()")
        runs = await claims.claim_due(conn, Grants("we", timedelta(seconds=6)).new(), limit=PUT_OFF)
        step = (end - start) / len(runs)
        deferred = [
            Settled(run.lease, Defer(start + number * step - now, Reason.OVERLAP), None)
            for number, run in enumerate(runs)
        ]
        assert len(await leases.defer(conn, deferred)) == len(runs) == PUT_OFF
    return runs


async def _waits(conn: Connection, deferred: list[ClaimedRun]) -> dict[str, list[timedelta]]:
    """How long after they were due attempts were started: the `first` ones, each `retry`, those of `deferred` runs."""
    rows = await conn.fetch(
        """SELECT CASE WHEN r.id = ANY ($1) THEN 'deferred' WHEN a.attempt > 1 THEN 'retry' ELSE 'first' END AS kind,
                  a.started_at - r.fire_after AS waited
             FROM run_attempt AS a
             JOIN job_run AS r ON r.id = a.run_id AND r.scheduled_for = a.scheduled_for
            WHERE a.outcome = 'delivered'""",
        [run.lease.ref.id for run in deferred],
    )
    found: dict[str, list[timedelta]] = {"first": [], "retry": [], "deferred": []}
    for kind, waited in rows:
        found[kind].append(waited)
    return found
