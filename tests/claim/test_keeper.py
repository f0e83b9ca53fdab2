from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from app import metrics
from app.claim import keeper as keeping
from app.claim.keeper import MARGIN_SHARE, Hold, LeaseKeeper, Standing
from app.domain.run import ClaimedRun, Complete, Lease, Settled
from app.errors import LeaseLost
from app.store import leases, settlements
from app.store.claims import LEFT_END
from app.store.pool import Connection, Pool, acquire, connect
from tests.eventually import eventually
from tests.factories_runs import (
    TTL,
    claim,
    claim_one,
    evidence,
    expire,
    request_cancel,
    run_row,
    seed_run,
)
from tests.tcp_proxy import tcp_proxy

NAME = "carillon tests, keeper"


class Clock:
    """Stands in for CLOCK_BOOTTIME in the keeper; moves only when told."""

    def __init__(self) -> None:
        self.now = 50_000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, share: float) -> None:
        """Let this share of a lease go by."""
        self.now += TTL.total_seconds() * share


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    frozen = Clock()
    monkeypatch.setattr(keeping, "boottime", frozen)
    return frozen


@pytest.fixture
async def keeper(dsn: str) -> AsyncIterator[LeaseKeeper]:
    made = _keeper(dsn)
    yield made
    await made.close()


def _keeper(dsn: str) -> LeaseKeeper:
    return LeaseKeeper(
        lambda: connect(dsn, application_name=NAME, command_timeout=timedelta(seconds=5)), ttl=TTL
    )


async def _claimed(db: Connection, clock: Clock) -> ClaimedRun:
    await seed_run(db)
    return replace(await claim_one(db), asked_at=clock.now)


@dataclass(slots=True)
class Sending:
    """A request that hangs until it is interrupted, or let go."""

    hold: Hold
    task: asyncio.Task[None]
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted: bool = False


async def _send(hold: Hold) -> Sending:
    """Start such a request under this hold."""
    begun = asyncio.Event()

    async def hang() -> None:
        try:
            with hold.interruptible():
                hold.confirm()
                begun.set()
                await sending.answer.wait()
        except asyncio.CancelledError:
            sending.interrupted = True

    task = asyncio.create_task(hang())
    sending = Sending(hold, task)
    await begun.wait()
    return sending


def _lost() -> float:
    value = metrics.REGISTRY.get_sample_value("scheduler_lease_lost_total")
    assert value is not None
    return value


async def test_extending_moves_the_end_of_the_lease_in_the_database_and_here(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    before = await run_row(db, run.lease.ref)
    with keeper.hold(run) as hold:
        clock.pass_by(0.5)
        assert await keeper.extend_all() is None
        clock.pass_by(0.8)  # 1.3 of a lease since the claim, 0.8 since it was extended
        hold.confirm()
        clock.pass_by(0.2)
        with pytest.raises(LeaseLost):
            hold.confirm()
    after = await run_row(db, run.lease.ref)
    assert after["claim_expires_at"] > before["claim_expires_at"]  # type: ignore[operator]


async def test_holding_nothing_opens_no_connection(db: Connection, keeper: LeaseKeeper) -> None:
    assert await keeper.extend_all() is None
    assert await _backends(db) == []


async def _backends(db: Connection) -> list[int]:
    rows = await db.fetch(
        "SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()", NAME
    )
    return [row[0] for row in rows]


async def test_the_keeper_has_one_connection_of_its_own_and_keeps_it(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run):
        await keeper.extend_all()
        first = await _backends(db)
        await keeper.extend_all()
    assert len(first) == 1
    assert await _backends(db) == first
    await keeper.close()
    await eventually(lambda: _is_gone(db, first[0]))


async def test_nothing_is_sent_in_the_last_tenth_of_a_lease(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        clock.pass_by(1 - MARGIN_SHARE - 0.01)
        hold.confirm()
        clock.pass_by(0.02)
        with pytest.raises(LeaseLost):
            hold.confirm()
    # The keeper's own word for it ends before the database's does.
    row = await run_row(db, run.lease.ref)
    assert row["claim_expires_at"] > await db.fetchval("SELECT now()")


async def test_the_deadline_counts_from_before_the_extend_was_sent(
    db: Connection, keeper: LeaseKeeper, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await _claimed(db, clock)
    real = leases.extend

    async def slow(conn: Connection, held: Sequence[Lease], *, ttl: timedelta) -> leases.Extended:
        extended = await real(conn, held, ttl=ttl)
        clock.pass_by(0.6)
        return extended

    monkeypatch.setattr(leases, "extend", slow)
    with keeper.hold(run) as hold:
        await keeper.extend_all()
        hold.confirm()
        clock.pass_by(0.4)
        with pytest.raises(LeaseLost):
            hold.confirm()


async def test_a_lease_taken_over_interrupts_the_request(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    lost = _lost()
    with keeper.hold(run) as hold:
        sending = await _send(hold)
        await expire(db, run.lease.ref)
        await claim_one(db, "two")
        await keeper.extend_all()
        await sending.task
        assert (sending.interrupted, hold.standing) == (True, Standing.LOST)
        with pytest.raises(LeaseLost):
            hold.confirm()
        await keeper.extend_all()
    assert _lost() == lost + 1


async def test_a_row_that_somebody_holds_is_busy_and_not_lost(
    db: Connection, pool: Pool, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        sending = await _send(hold)
        clock.pass_by(0.5)
        async with acquire(pool) as holder, holder.transaction():
            await holder.execute("SELECT FROM job_run WHERE id = $1 FOR UPDATE", run.lease.ref.id)
            await keeper.extend_all()
        assert (sending.interrupted, hold.standing) == (False, Standing.HELD)
        hold.confirm()
        clock.pass_by(0.5)  # busy leases are not extended: the old deadline holds
        with pytest.raises(LeaseLost):
            hold.confirm()
        sending.answer.set()
        await sending.task


async def test_a_lease_that_its_own_settlement_has_ended_is_not_lost(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    lost = _lost()
    with keeper.hold(run) as hold:
        await settlements.complete(db, [Settled(run.lease, Complete(), evidence())])
        await keeper.extend_all()
        assert hold.standing is Standing.HELD
    assert _lost() == lost


async def test_a_cancel_request_interrupts_the_request_and_keeps_the_lease(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        sending = await _send(hold)
        await request_cancel(db, run.lease.ref)
        await keeper.extend_all()
        await sending.task
        assert (sending.interrupted, hold.standing) == (True, Standing.CANCELLING)
    assert await settlements.complete(db, [Settled(run.lease, Complete(), evidence())])


async def test_a_cancel_request_before_the_request_is_sent_forbids_sending_it(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        await request_cancel(db, run.lease.ref)
        await keeper.extend_all()
        with pytest.raises(LeaseLost):
            hold.confirm()


async def test_a_delivery_three_leases_long_keeps_its_run(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    """The keeper's turns are a third of a lease apart; one after another everybody else finds the lease live."""
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        for _ in range(9):
            clock.pass_by(1 / 3)
            await db.execute("UPDATE job_run SET claim_expires_at = claim_expires_at - $1::interval", TTL / 3)
            assert await claim(db, "two") == []
            assert (await leases.reap(db, behind=LEFT_END, limit=99, longest=TTL)).freed == []
            hold.confirm()
            await keeper.extend_all()
    assert (await run_row(db, run.lease.ref))["claimed_by"] == run.lease.token


async def test_a_lost_connection_costs_no_lease_and_is_replaced(
    dsn: str, db: Connection, clock: Clock
) -> None:
    async with tcp_proxy(dsn) as (proxy, address):
        keeper = _keeper(address)
        run = await _claimed(db, clock)
        with keeper.hold(run) as hold:
            await keeper.extend_all()
            sending = await _send(hold)
            clock.pass_by(0.5)
            proxy.losing.set()
            again = await keeper.extend_all()
            assert again is not None
            assert again < TTL / 3  # tried again long before the next turn of its loop
            assert hold.standing is Standing.HELD
            assert await keeper.extend_all() is None
            clock.pass_by(0.5)
            hold.confirm()
            sending.answer.set()
            await sending.task
        await keeper.close()


async def test_a_session_that_the_server_ended_is_replaced(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        await keeper.extend_all()
        [backend] = await _backends(db)
        await db.execute("SELECT pg_terminate_backend($1)", backend)
        await eventually(lambda: _is_gone(db, backend))
        clock.pass_by(0.5)
        if (
            await keeper.extend_all() is not None
        ):  # the end of the session may or may not have been noticed before
            assert await keeper.extend_all() is None
        clock.pass_by(0.5)
        hold.confirm()


async def _is_gone(db: Connection, backend: int) -> bool:
    return backend not in await _backends(db)


async def test_a_database_away_costs_leases_only_by_their_own_deadline(
    dsn: str, db: Connection, clock: Clock
) -> None:
    async with tcp_proxy(dsn) as (proxy, address):
        keeper = _keeper(address)
        run = await _claimed(db, clock)
        with keeper.hold(run) as hold:
            await keeper.extend_all()
            sending = await _send(hold)
            proxy.go_away()
            clock.pass_by(0.8)
            assert await keeper.extend_all() is not None
            hold.confirm()
            clock.pass_by(0.2)
            assert await keeper.extend_all() is not None
            await sending.task
            assert (sending.interrupted, hold.standing) == (True, Standing.LOST)
            with pytest.raises(LeaseLost):
                hold.confirm()
        await keeper.close()


async def test_a_cut_that_is_over_in_time_costs_nothing(dsn: str, db: Connection, clock: Clock) -> None:
    async with tcp_proxy(dsn) as (proxy, address):
        keeper = _keeper(address)
        run = await _claimed(db, clock)
        with keeper.hold(run) as hold:
            await keeper.extend_all()
            proxy.go_away()
            clock.pass_by(0.6)
            await keeper.extend_all()
            proxy.come_back()
            assert await keeper.extend_all() is None
            clock.pass_by(0.6)
            hold.confirm()
        await keeper.close()


async def test_two_leases_of_this_replica_on_one_run_stand_for_themselves(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    await expire(db, run.lease.ref)
    again = replace(await claim_one(db), asked_at=clock.now)
    with keeper.hold(run) as old, keeper.hold(again) as new:
        stale, fresh = await _send(old), await _send(new)
        await keeper.extend_all()
        await stale.task
        assert (old.standing, new.standing) == (Standing.LOST, Standing.HELD)
        assert not fresh.interrupted
        fresh.answer.set()
        await fresh.task
    assert keeper.held == 0


async def test_abandoning_interrupts_every_request_and_only_the_first_reason_counts(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    runs = [await _claimed(db, clock) for _ in range(2)]
    with keeper.hold(runs[0]) as cancelled, keeper.hold(runs[1]) as other:
        sending = [await _send(cancelled), await _send(other)]
        await request_cancel(db, runs[0].lease.ref)
        await keeper.extend_all()
        keeper.abandon_all()
        await asyncio.gather(*(one.task for one in sending))
        assert (cancelled.standing, other.standing) == (Standing.CANCELLING, Standing.ABANDONED)


async def test_an_interrupt_between_two_requests_forbids_the_next_and_cancels_nobody(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)
    with keeper.hold(run) as hold:
        sending = await _send(hold)
        sending.answer.set()
        await sending.task
        keeper.abandon_all()
        await asyncio.sleep(0)
        assert not sending.interrupted
        with pytest.raises(LeaseLost):
            hold.confirm()


async def test_a_run_is_held_exactly_as_long_as_its_block_also_when_that_fails(
    db: Connection, keeper: LeaseKeeper, clock: Clock
) -> None:
    run = await _claimed(db, clock)

    def fail() -> None:
        with keeper.hold(run):
            assert keeper.held == 1
            raise ValueError

    failing: Callable[[], None] = fail
    with pytest.raises(ValueError):
        failing()
    assert keeper.held == 0
