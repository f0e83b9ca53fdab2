from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from app import metrics
from app.claim import reaper as reaping
from app.claim.reaper import Reaper
from app.domain.run import ClaimedRun, RunRef
from app.store.pool import Connection, Pool
from tests.factories_runs import (
    SECOND,
    TTL,
    attempt_rows,
    claim,
    expire,
    run_row,
    seed_run,
    seed_runs,
    seed_schedule,
    set_run,
)


class Announced:
    """A strategy that only notes what is announced."""

    def __init__(self) -> None:
        self.runs: list[RunRef] = []

    async def open(self) -> None: ...

    async def announce(self, runs: Sequence[RunRef]) -> None:
        self.runs.extend(runs)

    async def claim(self, limit: int) -> list[ClaimedRun]:
        return []

    async def leave(self) -> None: ...

    async def close(self) -> None: ...


def _reaped() -> float:
    value = metrics.REGISTRY.get_sample_value("scheduler_reaped_total")
    assert value is not None
    return value


async def test_freed_runs_are_announced_and_ended_ones_are_not(db: Connection, claim_pool: Pool) -> None:
    announced = Announced()
    free = await seed_run(db)
    spent = await seed_run(db, attempt=4, max_attempts=5)
    await claim(db)
    await expire(db)
    before = _reaped()
    await Reaper(claim_pool, announced, ttl=TTL).reap_expired()
    assert announced.runs == [free]
    assert (await run_row(db, spent))["status"] == "failed"
    assert _reaped() == before + 2


async def test_passes_go_on_where_the_last_one_stopped_and_begin_again_at_the_end(
    db: Connection, claim_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaping, "SLICE", 2)
    announced = Announced()
    refs = await seed_runs(db, await seed_schedule(db), 5, due_ago=99 * SECOND, apart=SECOND)
    await claim(db)
    await expire(db, refs[4])
    reaper = Reaper(claim_pool, announced, ttl=TTL)
    await reaper.reap_expired()
    await reaper.reap_expired()
    assert announced.runs == []
    await reaper.reap_expired()
    assert announced.runs == [refs[4]]
    await expire(db, refs[0])
    await reaper.reap_expired()
    assert announced.runs == [refs[4], refs[0]]


async def test_a_pass_without_anything_to_do_announces_nothing(db: Connection, claim_pool: Pool) -> None:
    announced = Announced()
    await seed_run(db)
    await claim(db)
    await Reaper(claim_pool, announced, ttl=TTL).reap_expired()
    assert announced.runs == []


async def test_a_lease_from_a_clock_that_was_ahead_ends_after_a_lawful_length(
    db: Connection, claim_pool: Pool
) -> None:
    announced = Announced()
    ref = await seed_run(db)
    await claim(db)
    now = await db.fetchval("SELECT now()")
    await set_run(db, ref, claim_expires_at=now + timedelta(days=365))
    reaper = Reaper(claim_pool, announced, ttl=timedelta(microseconds=1))
    await reaper.reap_expired()
    await reaper.reap_expired()
    assert announced.runs == [ref]
    assert [row["outcome"] for row in await attempt_rows(db, ref)] == ["lease_lost"]
