"""A replica that has lost a run replays every verb it knows, and changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

import pytest

from app.claim.grant import Grants
from app.domain.outcome import Abandoned
from app.domain.run import Cancel, Complete, Defer, Fail, Lease, Reason, Retry, Settled, Settlement
from app.store import claims, leases, settlements
from app.store.claims import LEFT_END
from app.store.leases import Key, key_of
from app.store.pool import Connection
from tests.factories_runs import (
    TTL,
    attempt_rows,
    claim_one,
    everything,
    evidence,
    expire,
    run_row,
    seed_run,
)


@pytest.fixture
def dsn(each_server_dsn: str) -> str:
    """All of this on the oldest supported server too: the rules of row locks are the server's."""
    return each_server_dsn


Verb = Callable[[Connection, Lease], Awaitable[bool]]
"""Replays one verb with a lease; true when it says that it wrote something."""


def _as(lease: Lease, settlement: Settlement) -> list[Settled]:
    proof = evidence(Abandoned("late", is_maybe_delivered=True))
    return [Settled(lease, settlement, proof)]


async def _extend(conn: Connection, lease: Lease) -> bool:
    extended = await leases.extend(conn, [lease], ttl=TTL)
    assert extended.busy == frozenset()
    assert extended.kept | extended.lost == {lease}
    return bool(extended.kept)


async def _complete(conn: Connection, lease: Lease) -> bool:
    return bool(await settlements.complete(conn, _as(lease, Complete())))


async def _retry(conn: Connection, lease: Lease) -> bool:
    return bool(await settlements.retry(conn, _as(lease, Retry(timedelta(seconds=5)))))


async def _fail(conn: Connection, lease: Lease) -> bool:
    return bool(await settlements.fail(conn, _as(lease, Fail(Reason.ATTEMPTS_SPENT))))


async def _cancel(conn: Connection, lease: Lease) -> bool:
    return bool(await settlements.cancel(conn, _as(lease, Cancel(Reason.CANCELLED))))


async def _defer(conn: Connection, lease: Lease) -> bool:
    return bool(await leases.defer(conn, _as(lease, Defer(timedelta(seconds=5), Reason.OVERLAP))))


async def _release(conn: Connection, lease: Lease) -> bool:
    return bool(await leases.release(conn, [lease]))


async def _mark_failed(conn: Connection, lease: Lease) -> bool:
    [item] = _as(lease, Complete())
    return await settlements.mark_failed(conn, item, reason=Reason.SETTLEMENT_REFUSED)


async def _release_by_token(conn: Connection, lease: Lease) -> bool:
    return await claims.release_by_token(conn, lease.token) > 0


async def _reap(conn: Connection, lease: Lease) -> bool:
    reaped = await leases.reap(conn, behind=LEFT_END, limit=1000, longest=TTL)
    return bool(reaped.freed or reaped.ended)


OWNER_VERBS: dict[str, Verb] = {
    "extend": _extend,
    "complete": _complete,
    "retry": _retry,
    "fail": _fail,
    "cancel": _cancel,
    "defer": _defer,
    "release": _release,
    "mark_failed": _mark_failed,
    "release_by_token": _release_by_token,
}
VERBS = {**OWNER_VERBS, "reap": _reap}

SELF = Grants("one", TTL)
"""One process: every claim of it has the same prefix and a token of its own."""


async def _claim_as_self(conn: Connection) -> Lease:
    [run] = await claims.claim_due(conn, SELF.new(), limit=1)
    return run.lease


async def _reap_it(conn: Connection, lease: Lease) -> None:
    await expire(conn, lease.ref)
    reaped = await leases.reap(conn, behind=LEFT_END, limit=1000, longest=TTL)
    assert [ref.id for ref in reaped.freed] == [lease.ref.id]


async def _reaped_and_claimed_by_another(conn: Connection, lease: Lease) -> None:
    await _reap_it(conn, lease)
    assert (await claim_one(conn, "two")).lease.attempt == lease.attempt + 1


async def _reaped_and_claimed_by_itself(conn: Connection, lease: Lease) -> None:
    await _reap_it(conn, lease)
    again = await _claim_as_self(conn)
    assert again.token.rpartition("/")[0] == lease.token.rpartition("/")[0]


async def _taken_over_by_another(conn: Connection, lease: Lease) -> None:
    await expire(conn, lease.ref)
    await claim_one(conn, "two")


async def _taken_over_by_itself(conn: Connection, lease: Lease) -> None:
    await expire(conn, lease.ref)
    await _claim_as_self(conn)


async def _released_and_claimed_by_itself(conn: Connection, lease: Lease) -> None:
    assert await _release(conn, lease)
    again = await _claim_as_self(conn)
    assert again.attempt == lease.attempt  # the same number: only the token tells the two apart


async def _succeeded(conn: Connection, lease: Lease) -> None:
    assert await _complete(conn, lease)


async def _failed(conn: Connection, lease: Lease) -> None:
    assert await _fail(conn, lease)


async def _cancelled(conn: Connection, lease: Lease) -> None:
    assert await _cancel(conn, lease)


async def _released(conn: Connection, lease: Lease) -> None:
    assert await _release(conn, lease)


async def _put_back_for_a_retry(conn: Connection, lease: Lease) -> None:
    assert await _retry(conn, lease)


FATES = [
    _reaped_and_claimed_by_another,
    _reaped_and_claimed_by_itself,
    _taken_over_by_another,
    _taken_over_by_itself,
    _released_and_claimed_by_itself,
    _succeeded,
    _failed,
    _cancelled,
    _released,
    _put_back_for_a_retry,
]


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__.strip("_"))
async def test_a_loser_replays_every_verb_and_changes_nothing(
    db: Connection, fate: Callable[[Connection, Lease], Awaitable[None]]
) -> None:
    await seed_run(db)
    lost = await _claim_as_self(db)
    await fate(db, lost)
    before = await everything(db)
    for name, replay in VERBS.items():
        assert not await replay(db, lost), f"{name} says that it wrote"
        assert await everything(db) == before, f"{name} wrote"


@pytest.mark.parametrize("verb", OWNER_VERBS)
async def test_the_owner_is_obeyed(db: Connection, verb: str) -> None:
    """The control of the test above: what changes nothing for a loser does change the owner's run."""
    ref = await seed_run(db)
    await _claim_as_self(db)
    await expire(db, ref)
    own = (await claim_one(db, "two")).lease
    before = await run_row(db, ref)
    assert await OWNER_VERBS[verb](db, own)
    assert await run_row(db, ref) != before


async def test_the_reaper_takes_an_expired_lease(db: Connection) -> None:
    ref = await seed_run(db)
    lease = await _claim_as_self(db)
    assert not await _reap(db, lease)
    await expire(db, ref)
    assert await _reap(db, lease)
    assert (await run_row(db, ref))["claimed_by"] is None


async def test_an_expired_lease_that_nobody_took_still_allows_its_settlement(db: Connection) -> None:
    """The answer is in hand, and the guard alone decides: without a successor nothing speaks against it."""
    ref = await seed_run(db)
    lease = await _claim_as_self(db)
    await expire(db, ref)
    assert await _complete(db, lease)
    assert (await run_row(db, ref))["status"] == "succeeded"
    [row] = await attempt_rows(db, ref)
    assert (row["attempt"], row["lease_token"]) == (1, lease.token)


Write = Callable[[Connection, Sequence[Settled]], Awaitable[set[Key]]]

SETTLE_VERBS: dict[str, tuple[Write, Settlement]] = {
    "complete": (settlements.complete, Complete()),
    "retry": (settlements.retry, Retry(timedelta(seconds=5))),
    "fail": (settlements.fail, Fail(Reason.ATTEMPTS_SPENT)),
    "cancel": (settlements.cancel, Cancel(Reason.CANCELLED)),
}


@pytest.mark.parametrize("verb", SETTLE_VERBS)
@pytest.mark.parametrize("newest_first", [False, True])
async def test_two_leases_of_one_process_on_one_run_are_told_apart_in_one_group(
    db: Connection, verb: str, newest_first: bool
) -> None:
    """It lost the run and claimed it again while the first attempt was still under way; both are settled together."""
    write, settlement = SETTLE_VERBS[verb]
    ref = await seed_run(db)
    old = await _claim_as_self(db)
    await expire(db, ref)
    new = await _claim_as_self(db)
    items = [
        Settled(old, settlement, evidence(worker="the loser")),
        Settled(new, settlement, evidence(worker="the owner")),
    ]
    written = await write(db, items[::-1] if newest_first else items)
    assert written == {key_of(new)}
    rows = await attempt_rows(db, ref)
    assert [(row["attempt"], row["outcome"], row["lease_token"]) for row in rows] == [
        (1, "lease_lost", old.token),
        (2, "delivered", new.token),
    ]
    assert rows[1]["worker"] == "the owner"


@pytest.mark.parametrize("newest_first", [False, True])
async def test_two_leases_of_one_process_on_one_run_are_extended_for_what_they_are(
    db: Connection, newest_first: bool
) -> None:
    ref = await seed_run(db)
    old = await _claim_as_self(db)
    await expire(db, ref)
    new = await _claim_as_self(db)
    extended = await leases.extend(db, [new, old] if newest_first else [old, new], ttl=TTL)
    assert extended.kept == {new}
    assert extended.lost == {old}


async def test_release_does_not_decrement_a_run_reclaimed_elsewhere(db: Connection) -> None:
    ref = await seed_run(db)
    lost = await _claim_as_self(db)
    await expire(db, ref)
    await claim_one(db, "two")
    assert not await _release(db, lost)
    assert (await run_row(db, ref))["attempt"] == 2
