"""All verbs at once on few runs and short leases, watched by a trigger that writes down every change of owner.

Workers claim in all three ways, two of them under one name; they extend, settle, give back, replay what they have
lost, and forget what they hold. Two reapers and a person who cancels join in. Whatever the interleaving: a live
lease changes hands by its owner only, what has ended stays as it is, and the attempts are numbered without a gap.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from app.claim.grant import Grants
from app.domain.admit import admit
from app.domain.outcome import Abandoned
from app.domain.run import (
    Cancel,
    ClaimedRun,
    Complete,
    Defer,
    Fail,
    Lease,
    Reason,
    Retry,
    RunRef,
    Settled,
)
from app.store import claims, leases, settlements
from app.store.claims import LEFT_END, Share
from app.store.pool import PLAN_GUARDS, Connection, close, connect
from tests.factories_runs import evidence, seed_runs, seed_schedule

TTL = timedelta(milliseconds=60)
RUNS_PER_TENANT = 40
TENANTS = 5
TURNS = 350

WATCH = """
CREATE TABLE moved (
    place bigint GENERATED ALWAYS AS IDENTITY, run uuid, old_token text, new_token text, was_expired boolean,
    old_status text, new_status text, old_attempt int, new_attempt int
);
CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO moved (run, old_token, new_token, was_expired, old_status, new_status, old_attempt, new_attempt)
    VALUES (old.id, old.claimed_by, new.claimed_by, old.claim_expires_at < now(), old.status, new.status,
            old.attempt, new.attempt);
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER UPDATE ON job_run FOR EACH ROW EXECUTE FUNCTION watch();
"""


@pytest.fixture
def dsn(each_server_dsn: str) -> str:
    """All of this on the oldest supported server too: the rules of row locks are the server's."""
    return each_server_dsn


@dataclass(slots=True)
class Ledger:
    """What the actors were told: which lease ended how, by their own doing."""

    refs: list[RunRef]
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: set[tuple[str, str]] = field(default_factory=set)
    claimed: int = 0

    def note(self, lease: Lease, *, is_written: bool) -> None:
        key = (str(lease.ref.id), lease.token)
        if is_written:
            self.ended[key] += 1
        else:
            self.refused.add(key)


@dataclass(slots=True)
class Worker:
    """One actor with two connections, as a replica has them."""

    claiming: Connection
    writing: Connection
    grants: Grants
    ledger: Ledger
    rng: random.Random
    held: list[Lease] = field(default_factory=list)
    stale: list[Lease] = field(default_factory=list)

    async def work(self) -> None:
        for _ in range(TURNS):
            await self.rng.choices(
                [self.claim, self.extend, self.settle, self.replay, self.forget, self.dawdle],
                weights=[5, 2, 8, 2, 1, 2],
            )[0]()

    async def claim(self) -> None:
        runs = await self._claim_somehow()
        self.ledger.claimed += len(runs)
        for run in runs:
            unsent = admit(run)
            if unsent is None:
                self.held.append(run.lease)
            elif isinstance(unsent, Fail):
                written = await settlements.fail(self.writing, [Settled(run.lease, unsent, None)])
                self.ledger.note(run.lease, is_written=bool(written))
            elif isinstance(unsent, Cancel):
                written = await settlements.cancel(self.writing, [Settled(run.lease, unsent, None)])
                self.ledger.note(run.lease, is_written=bool(written))

    async def _claim_somehow(self) -> list[ClaimedRun]:
        grant = self.grants.new()
        match self.rng.randrange(3):
            case 0:
                return await claims.claim_due(self.claiming, grant, limit=self.rng.randint(1, 6))
            case 1:
                tenants = {ref.tenant_id for ref in self.ledger.refs}
                shares = [Share(tenant, self.rng.randint(1, 3), LEFT_END) for tenant in tenants]
                return await claims.claim_ring(self.claiming, grant, shares=shares)
            case _:
                return await claims.claim_hinted(
                    self.claiming, grant, refs=self.rng.sample(self.ledger.refs, 4)
                )

    async def extend(self) -> None:
        extended = await leases.extend(self.writing, self.held, ttl=TTL)
        for lease in extended.lost:
            self.ledger.note(lease, is_written=False)
            self.held.remove(lease)
            self.stale.append(lease)

    async def settle(self) -> None:
        self.rng.shuffle(self.held)
        group = [self.held.pop() for _ in range(min(len(self.held), self.rng.randint(1, 4)))]
        if group:
            await self._write(group)
            self.stale += group

    async def replay(self) -> None:
        """What this actor has lost or ended long ago, once more: by any verb."""
        if self.stale:
            await self._write(self.rng.sample(self.stale, min(len(self.stale), 3)))

    async def _write(self, group: list[Lease]) -> None:
        proof = evidence(Abandoned("raced", is_maybe_delivered=True))
        match self.rng.randrange(12):
            case 0:
                written = await settlements.complete(
                    self.writing, [Settled(lease, Complete(), proof) for lease in group]
                )
            case 2 | 3 | 4 | 5 | 6:
                written = await settlements.retry(
                    self.writing, [Settled(lease, Retry(timedelta()), proof) for lease in group]
                )
            case 1:
                item = Settled(group[0], Complete(), proof)
                failed = await settlements.fail(
                    self.writing, [Settled(group[0], Fail(Reason.NOT_RETRYABLE), proof)]
                )
                again = await settlements.mark_failed(self.writing, item, reason=Reason.SETTLEMENT_REFUSED)
                assert not (failed and again)
                written, group = failed, group[:1]
                if again:  # nobody can have failed it in between but its owner, and that was refused
                    self.ledger.note(group[0], is_written=True)
                    return
            case 7 | 8:
                deferred = [Settled(lease, Defer(timedelta(), Reason.OVERLAP), None) for lease in group]
                written = await leases.defer(self.writing, deferred)
            case _:
                written = await leases.release(self.writing, group)
        for lease in group:
            self.ledger.note(lease, is_written=leases.key_of(lease) in written)

    async def forget(self) -> None:
        """A crash: what is held stays leased until its time is over, and is replayed by a zombie later."""
        self.stale += self.held
        self.held.clear()

    async def dawdle(self) -> None:
        await asyncio.sleep(TTL.total_seconds() * self.rng.random())


async def _reap_again_and_again(conn: Connection, rng: random.Random) -> None:
    for _ in range(TURNS // 2):
        await leases.reap(conn, behind=LEFT_END, limit=rng.randint(5, 200), longest=TTL)
        await asyncio.sleep(TTL.total_seconds() / 4)


async def _cancel_now_and_then(conn: Connection, ledger: Ledger, rng: random.Random) -> None:
    """As a person does: a free run ends at once, the owner of a leased one is asked."""
    for ref in rng.sample(ledger.refs, len(ledger.refs) // 6):
        await conn.execute(
            """UPDATE job_run
                  SET status = CASE WHEN claimed_by IS NULL THEN 'cancelled' ELSE status END,
                      finished_at = CASE WHEN claimed_by IS NULL THEN now() END,
                      cancel_requested_at = CASE WHEN claimed_by IS NULL THEN cancel_requested_at ELSE now() END
                WHERE id = $1 AND status IN ('pending', 'retrying')""",
            ref.id,
        )
        await asyncio.sleep(TTL.total_seconds())


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_interleaving_steals_a_live_lease_or_touches_what_has_ended(
    dsn: str, db: Connection, seed: int
) -> None:
    rng = random.Random(seed)
    refs = [
        ref
        for _ in range(TENANTS)
        for ref in await seed_runs(db, await seed_schedule(db), RUNS_PER_TENANT, max_attempts=8)
    ]
    await db.execute(WATCH)
    ledger = Ledger(refs)
    opened: list[Connection] = []

    async def open_one(**settings: str) -> Connection:
        opened.append(await connect(dsn, application_name="a racer", settings=settings))
        return opened[-1]

    try:
        async with asyncio.TaskGroup() as group:
            for name in ("same", "same", "other"):
                worker = Worker(
                    await open_one(**PLAN_GUARDS),
                    await open_one(),
                    Grants(name, TTL),
                    ledger,
                    random.Random(rng.random()),
                )
                group.create_task(worker.work())
            for _ in range(2):
                reaper = await open_one(**PLAN_GUARDS)
                group.create_task(_reap_again_and_again(reaper, random.Random(rng.random())))
            group.create_task(_cancel_now_and_then(await open_one(), ledger, random.Random(rng.random())))
    finally:
        for conn in opened:
            await close(conn)
    await _assert_nothing_was_stolen(db, ledger)
    await _assert_attempts_are_dense(db)
    # Or nothing was raced at all:
    assert ledger.claimed > 2 * len(refs)
    assert ledger.refused
    assert await db.fetchval("SELECT count(*) FROM moved WHERE old_token <> new_token") > 0


async def _assert_nothing_was_stolen(db: Connection, ledger: Ledger) -> None:
    ended = ("succeeded", "failed", "cancelled")
    touched = await db.fetch("SELECT * FROM moved WHERE old_status = ANY($1::text[])", list(ended))
    assert touched == []
    stolen = await db.fetch(
        "SELECT * FROM moved WHERE old_token <> new_token AND NOT was_expired ORDER BY place"
    )
    assert stolen == []
    # A live lease that ended without a successor was ended by its owner, who was told so, exactly once.
    given_up = await db.fetch(
        "SELECT run, old_token, was_expired FROM moved WHERE old_token IS NOT NULL AND new_token IS NULL"
    )
    by_lease = Counter((str(row["run"]), row["old_token"]) for row in given_up)
    assert set(by_lease.values()) <= {1}
    for row in given_up:
        lease = (str(row["run"]), row["old_token"])
        assert row["was_expired"] or ledger.ended[lease] == 1, row
    assert set(ledger.ended.values()) <= {1}
    assert set(ledger.ended) <= set(by_lease)
    # Whoever was refused had ended the lease before, or was overtaken after its end.
    taken = await db.fetch("SELECT run, old_token FROM moved WHERE old_token <> new_token AND was_expired")
    overtaken = {(str(row["run"]), row["old_token"]) for row in taken}
    reaped = {(str(row["run"]), row["old_token"]) for row in given_up if row["was_expired"]}
    assert ledger.refused <= set(ledger.ended) | overtaken | reaped
    # A claim spends one attempt; a run given back, put off or ended unsent has it back; nothing else counts.
    steps = await db.fetch(
        """SELECT * FROM moved
            WHERE new_attempt - old_attempt <> CASE WHEN new_token IS DISTINCT FROM old_token AND new_token IS NOT NULL
                                                    THEN least(1, 8 - old_attempt) ELSE 0 END
              AND NOT (old_token IS NOT NULL AND new_token IS NULL AND new_attempt = old_attempt - 1
                       AND new_status IN (old_status, 'failed', 'cancelled'))"""
    )
    assert steps == []


async def _assert_attempts_are_dense(db: Connection) -> None:
    rows = await db.fetch(
        """SELECT r.attempt, array_agg(a.attempt ORDER BY a.attempt) AS evidence
             FROM job_run AS r JOIN run_attempt AS a ON a.run_id = r.id AND a.scheduled_for = r.scheduled_for
            GROUP BY r.id, r.attempt"""
    )
    for attempt, numbers in rows:
        assert numbers == list(range(1, len(numbers) + 1))
        assert attempt - len(numbers) in (0, 1)
    # One number more than there is evidence: under way, or ended without having been sent.
    silent = await db.fetch(
        """SELECT * FROM job_run AS r
            WHERE claimed_by IS NULL AND status IN ('pending', 'retrying')
              AND attempt <> (SELECT count(*) FROM run_attempt AS a WHERE a.run_id = r.id)"""
    )
    assert silent == []
    shared = await db.fetch("SELECT run_id, lease_token FROM run_attempt GROUP BY 1, 2 HAVING count(*) > 1")
    assert shared == []
