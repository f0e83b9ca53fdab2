"""The claim strategy by hints, on a real database and a topic that does what the test says.

The grace here is five minutes unless a test shortens it: what is claimed at once, a hint has claimed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from app.boottime import boottime
from app.claim.due import DueClaims
from app.claim.grant import Grants
from app.claim.kafka import claims as strategy
from app.claim.kafka import intake
from app.claim.kafka.calls import TopicUnavailable
from app.claim.kafka.claims import KafkaClaims
from app.claim.kafka.hint import decode
from app.claim.load import TenantLoad
from app.domain.ids import TenantId
from app.domain.run import ClaimedRun, RunRef
from app.errors import ConfigError, StoreUnavailable
from app.settings import KafkaSettings
from app.store import claims
from app.store.pool import Connection, Pool
from tests.claim.kafka.feed import Feed
from tests.claim.kafka.tally import Tally
from tests.eventually import eventually
from tests.factories_runs import SECOND, TTL, run_row, seed_run, seed_runs, seed_schedule, set_run

pytestmark = pytest.mark.timeout(60)

FOREVER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Rig:
    """The strategy, what it stands on, and the load it must heed."""

    claims: KafkaClaims
    due: DueClaims
    feed: Feed
    load: TenantLoad

    async def begin(self) -> None:
        """One idle claim: from here on it receives, and the first sweep is over."""
        assert await self.claims.claim(1) == []

    async def claim_all(self, count: int, *, limit: int = 100) -> list[ClaimedRun]:
        """Claim until there are so many runs; they are not taken into the load."""
        runs: list[ClaimedRun] = []
        while len(runs) < count:
            runs += await self.claims.claim(limit)
        return runs


Open = Callable[..., Any]


@pytest.fixture
async def open_rig(claim_pool: Pool) -> AsyncIterator[Open]:
    """Opens strategies as replicas do; they are left and closed at the end."""
    opened: list[Rig] = []

    async def make(
        *,
        slots: int = 100,
        cap: int = 50,
        feed: Feed | None = None,
        pool: Pool | None = None,
        **settings: Any,
    ) -> Rig:
        base: dict[str, Any] = {"bootstrap": "127.0.0.1:9", "grace": FOREVER}
        kafka = KafkaSettings(**(base | settings))
        load = TenantLoad(slots=slots, cap=cap)
        due = DueClaims(
            pool or claim_pool, Grants("one", TTL), load, rng=random.Random(7), overdue_by=kafka.grace
        )
        feed = feed or Feed()
        rig = Rig(KafkaClaims(due, feed, load, kafka), due, feed, load)
        await rig.claims.open()
        opened.append(rig)
        return rig

    yield make
    for rig in opened:
        await rig.claims.leave()
        await rig.claims.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TIDY_EVERY", 0.0)


def take(load: TenantLoad, runs: Sequence[ClaimedRun]) -> list[TenantId]:
    tenants = [run.lease.ref.tenant_id for run in runs]
    for tenant in tenants:
        load.take(tenant)
        assert load.room(tenant) >= 0, "a tenant has more than its cap"
    return tenants


def refs_of(runs: Sequence[ClaimedRun]) -> set[RunRef]:
    return {run.lease.ref for run in runs}


async def turns(rig: Rig, count: int) -> None:
    """Wait until it has received so many times more."""
    before = rig.feed.count("receive")
    await eventually(lambda: rig.feed.count("receive") >= before + count)


async def test_hinted_runs_are_leased_and_counted(open_rig: Open, db: Connection, tally: Tally) -> None:
    rig = await open_rig()
    refs = await seed_runs(db, await seed_schedule(db), 5)
    rig.feed.put(*refs)
    runs = await rig.claim_all(5)
    assert refs_of(runs) == set(refs)
    for run in runs:
        row = await run_row(db, run.lease.ref)
        assert (row["claimed_by"], row["attempt"]) == (run.lease.token, 1)
    assert (tally("received"), tally("claimed"), tally("refused")) == (5, 5, 0)


async def test_an_early_hint_waits_for_its_time_and_is_asked_for_once(
    open_rig: Open, db: Connection, tally: Tally
) -> None:
    rig = await open_rig()
    [ref] = await seed_runs(db, await seed_schedule(db), 1, due_ago=-3 * SECOND)
    rig.feed.put(ref)
    [run] = await rig.claim_all(1)
    assert run.lease.ref == ref
    assert run.granted_at >= ref.fire_after
    assert (tally("claimed"), tally("refused")) == (1, 0), "not asked for before its time"


async def test_the_clock_for_hints_is_never_ahead_of_the_databases(open_rig: Open, db: Connection) -> None:
    rig = await open_rig()
    for _ in range(50):
        shown = await rig.due.database_time()
        assert shown <= await db.fetchval("SELECT clock_timestamp()")


async def test_refused_hints_are_used_up(open_rig: Open, db: Connection, tally: Tally) -> None:
    """Taken by another, ended, early in the database's eyes, unknown, another tenant's: nothing is claimed by them,
    and nothing waits for them."""
    rig = await open_rig()
    schedule = await seed_schedule(db)
    taken, ended, deferred, good, foreign, unknown = await seed_runs(db, schedule, 6)
    await db.execute("DELETE FROM job_run WHERE id = $1", unknown.id)
    [other] = await claims.claim_hinted(db, Grants("other", TTL).new(), refs=[taken])
    await set_run(db, ended, status="succeeded", finished_at=ended.scheduled_for)
    await set_run(db, deferred, fire_after=deferred.fire_after + timedelta(hours=1))
    rig.feed.put(taken, ended, deferred, unknown, replace(foreign, tenant_id=TenantId(uuid4())), good)
    [run] = await rig.claim_all(1)
    assert run.lease.ref == good
    await eventually(lambda: rig.feed.committed == {0: 6})
    assert (tally("claimed"), tally("refused")) == (1, 5)
    assert (await run_row(db, taken))["claimed_by"] == other.lease.token
    assert (await run_row(db, foreign))["claimed_by"] is None


async def test_hints_that_come_again_claim_nothing_again(
    open_rig: Open, db: Connection, tally: Tally
) -> None:
    one, other = await open_rig(), await open_rig()
    refs = await seed_runs(db, await seed_schedule(db), 20)
    for rig in (one, other):
        rig.feed.put(*refs, *refs, *refs)
    runs = await one.claim_all(20)
    assert await other.claims.claim(100) == []
    one.feed.put(*refs)
    assert await one.claims.claim(100) == []
    assert len({run.lease.ref.id for run in runs}) == 20
    assert tally("claimed") == 20
    for ref in refs:
        assert (await run_row(db, ref))["attempt"] == 1


async def test_offsets_are_committed_when_the_leases_are_written_and_not_before(
    open_rig: Open, db: Connection
) -> None:
    rig = await open_rig()
    refs = await seed_runs(db, await seed_schedule(db), 3)
    early = replace(
        (await seed_runs(db, await seed_schedule(db), 1))[0], fire_after=refs[0].fire_after + FOREVER
    )
    rig.feed.put(refs[0], early, *refs[1:])
    claiming = asyncio.create_task(rig.claim_all(3))
    await eventually(lambda: rig.feed.committed == {0: 1})
    leased = {run.lease.ref for run in await claiming}
    assert leased == set(refs)
    await turns(rig, 3)
    assert rig.feed.committed == {0: 1}, "the early one keeps its place"


async def test_no_tenant_gets_more_than_its_cap_and_all_get_their_turn(
    open_rig: Open, db: Connection
) -> None:
    rig = await open_rig(slots=20, cap=4)
    refs: list[RunRef] = []
    for _ in range(3):
        refs += await seed_runs(db, await seed_schedule(db), 30)
    rig.feed.put(*refs)
    held: list[TenantId] = []
    while len(held) < 12:
        held += take(rig.load, await rig.claims.claim(20))
    assert set(Counter(held).values()) == {4}
    assert await rig.claims.claim(8) == []


async def test_a_tenant_that_comes_off_its_cap_ends_the_wait(
    open_rig: Open, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle claim would wait for an hour here, and the next sweep is as far."""
    monkeypatch.setattr(strategy, "WAIT_AT_MOST", 3600.0)
    rig = await open_rig(slots=20, cap=1, sweep_interval=timedelta(seconds=30))
    first, second = await seed_runs(db, await seed_schedule(db), 2)
    rig.feed.put(first)
    [tenant] = take(rig.load, await rig.claims.claim(10))
    rig.feed.put(second)
    claiming = asyncio.create_task(rig.claims.claim(10))
    await eventually(lambda: rig.feed.committed == {0: 1})
    assert not claiming.done()
    async with asyncio.timeout(20):
        rig.load.give(tenant)
        assert refs_of(await claiming) == {second}


async def test_runs_without_a_hint_are_left_to_the_grace_and_then_swept(
    open_rig: Open, db: Connection
) -> None:
    rig = await open_rig(grace=timedelta(seconds=60))
    young = await seed_run(db, due_ago=30 * SECOND)
    old = await seed_run(db, due_ago=90 * SECOND)
    assert refs_of(await rig.claim_all(1)) == {old}
    assert await rig.claims.claim(100) == []
    await set_run(db, young, fire_after=young.fire_after - 60 * SECOND)
    assert [run.lease.ref.id for run in await rig.claim_all(1)] == [young.id]


async def test_due_retries_start_while_hints_saturate_the_replica(open_rig: Open, db: Connection) -> None:
    """Hints could fill the room of every claim for as long as the test lasts. The sweep has its share all the same: the
    retries are started before the hints run out, whatever a clock says."""
    rig = await open_rig(
        slots=8, cap=8, grace=timedelta(seconds=1), sweep_interval=timedelta(milliseconds=50)
    )
    hinted = await seed_runs(db, await seed_schedule(db), 1500, due_ago=timedelta())
    retries = await seed_runs(db, await seed_schedule(db), 6, due_ago=60 * SECOND, attempt=1)
    rig.feed.put(*hinted)
    started: list[RunRef] = []
    while not set(retries) <= set(started):
        runs = await rig.claims.claim(8)
        started += [run.lease.ref for run in runs]
        assert len(started) < 1500 + 6, "never while hints lasted"


async def test_a_sweep_has_a_quarter_of_the_slots_and_more_only_when_no_hint_is_due(
    open_rig: Open, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = 0.0
    monkeypatch.setattr(strategy, "boottime", lambda: boottime() + skipped)
    rig = await open_rig(slots=16, cap=16, grace=300 * SECOND, sweep_interval=30 * SECOND)
    await rig.begin()
    overdue = set(await seed_runs(db, await seed_schedule(db), 20, due_ago=600 * SECOND))
    hinted = set(await seed_runs(db, await seed_schedule(db), 30, due_ago=timedelta()))
    rig.feed.put(*hinted)
    await eventually(lambda: rig.feed.committed == {0: 0})

    async def claimed() -> tuple[int, int]:
        refs = refs_of(await rig.claims.claim(16))
        return len(refs & overdue), len(refs & hinted)

    skipped += 30
    behind = [(4, 0), (0, 16), (4, 0), (4, 0), (0, 14)]
    alone = [(4, 0), (4, 0)]
    assert [await claimed() for _ in range(7)] == behind + alone


async def test_a_sweep_that_is_behind_has_one_run_in_four_however_few_slots_are_free_at_once(
    open_rig: Open, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every slot is busy, a claim is for one run: one of them every half second would be next to nothing."""
    rig = await open_rig(slots=16, cap=16, grace=300 * SECOND, sweep_interval=30 * SECOND)
    await rig.begin()
    overdue = set(await seed_runs(db, await seed_schedule(db), 4, due_ago=600 * SECOND))
    hinted = set(await seed_runs(db, await seed_schedule(db), 20, due_ago=timedelta()))
    rig.feed.put(*hinted)
    await eventually(lambda: rig.feed.committed == {0: 0})
    monkeypatch.setattr(strategy, "boottime", lambda: boottime() + 30)
    first = await rig.claims.claim(1)
    monkeypatch.undo()
    started = [first, *[await rig.claims.claim(1) for _ in range(19)]]
    assert all(len(runs) == 1 for runs in started)
    kinds = "".join("s" if refs_of(runs) <= overdue else "h" for runs in started)
    assert kinds == "shhh" * 4 + "hhhh"


async def test_hints_that_could_not_be_asked_for_are_asked_for_again(
    open_rig: Open, db: Connection, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    rig = await open_rig()
    refs = await seed_runs(db, await seed_schedule(db), 10)
    real = claims.claim_hinted
    failing = [StoreUnavailable("lost"), StoreUnavailable("lost")]

    async def claim_hinted(*args: Any, **named: Any) -> list[ClaimedRun]:
        runs = await real(*args, **named)
        if failing:
            raise failing.pop()  # the answer is lost: the leases are there, and nobody knows of them
        return runs

    monkeypatch.setattr(claims, "claim_hinted", claim_hinted)
    rig.feed.put(*refs)
    runs: list[ClaimedRun] = []
    while len(runs) < 10:
        try:
            runs += await rig.claims.claim(100)
        except StoreUnavailable:
            await turns(rig, 2)
            assert rig.feed.committed.get(0, 0) == 0
    assert refs_of(runs) == set(refs)
    assert failing == []
    for ref in refs:
        assert (await run_row(db, ref))["attempt"] == 1, "the lost claim was given back"
    await eventually(lambda: rig.feed.committed == {0: 10})
    assert tally("claimed") == 10


async def test_a_replica_that_claims_nothing_receives_nothing(open_rig: Open) -> None:
    """Its hints would wait in vain, and their runs be late by the grace."""
    rig = await open_rig()
    await rig.claims.announce([])
    for _ in range(20):
        await asyncio.sleep(0)
    assert rig.feed.count("receive") == 0
    assert rig.feed.count("open") == 1, "it tells of what it plans"


async def test_what_is_announced_is_sent_as_hints(open_rig: Open, db: Connection, tally: Tally) -> None:
    rig = await open_rig()
    refs = await seed_runs(db, await seed_schedule(db), 3)
    await rig.claims.announce(refs)
    await eventually(lambda: tally("sent") == 3)
    assert [decode(key, value) for key, value in rig.feed.sent] == refs


async def test_a_broker_that_is_away_at_the_start_is_told_of_and_no_more(
    open_rig: Open, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    feed = Feed()
    feed.open_answer = TopicUnavailable("nobody there")
    feed.answers = [TopicUnavailable("nobody there")] * 1000
    rig = await open_rig(feed=feed, grace=SECOND)
    assert [record.message for record in caplog.records] == ["kafka.unavailable"]
    overdue = await seed_run(db, due_ago=60 * SECOND)
    assert refs_of(await rig.claim_all(1)) == {overdue}


async def test_a_wrong_configuration_ends_the_start(open_rig: Open) -> None:
    feed = Feed()
    feed.open_answer = ConfigError("SCHEDULER_KAFKA_IDEMPOTENCE: no")
    with pytest.raises(ConfigError, match="IDEMPOTENCE"):
        await open_rig(feed=feed)


async def test_leaving_ends_a_waiting_claim_and_every_later_one_and_commits_what_was_used(
    open_rig: Open, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "WAIT_AT_MOST", 3600.0)
    rig = await open_rig(sweep_interval=timedelta(seconds=30))
    used, later = await seed_runs(db, await seed_schedule(db), 2)
    rig.feed.put(used, replace(later, fire_after=later.fire_after + FOREVER))
    assert refs_of(await rig.claim_all(1)) == {used}
    waiting = asyncio.create_task(rig.claims.claim(10))
    await eventually(lambda: rig.feed.count("commit"))
    monkeypatch.setattr(intake, "TIDY_EVERY", 3600.0)
    async with asyncio.timeout(20):
        await rig.claims.leave()
        assert await waiting == []
    assert await rig.claims.claim(10) == []
    assert rig.feed.committed == {0: 1}
    assert rig.feed.calls[-1] == "stop"
    received = rig.feed.count("receive")
    for _ in range(20):
        await asyncio.sleep(0)
    assert rig.feed.count("receive") == received


async def test_a_cancelled_claim_gives_back_what_it_leased(open_rig: Open, db: Connection) -> None:
    rig = await open_rig()
    refs = await seed_runs(db, await seed_schedule(db), 5)
    claiming = asyncio.create_task(rig.claims.claim(100))
    await eventually(lambda: rig.feed.count("receive"))
    rig.feed.put(*refs)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    await rig.claims.leave()
    await rig.claims.close()
    for ref in refs:
        row = await run_row(db, ref)
        assert (row["claimed_by"], row["attempt"]) == (None, 0)


async def test_it_closes_without_ever_having_been_opened_or_left(claim_pool: Pool) -> None:
    load = TenantLoad(slots=1, cap=1)
    kafka = KafkaSettings(bootstrap="127.0.0.1:9")
    due = DueClaims(claim_pool, Grants("one", TTL), load, rng=random.Random(7), overdue_by=kafka.grace)
    feed = Feed()
    made = KafkaClaims(due, feed, load, kafka)
    await made.leave()
    await made.close()
    assert feed.calls[-1] == "close"
