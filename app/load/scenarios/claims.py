"""`claims`: claim → settle with attempt rows, without HTTP: what the database and the lease machinery can do."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.domain.ids import run_id
from app.errors import CarillonError
from app.load import seeds
from app.load.costs import Costs, Meter
from app.load.counting import rate
from app.load.cpu import Processes
from app.load.place import READY_WITHIN, Place
from app.load.progress import Show
from app.load.round import LEAD, SEEDED_PER_SECOND, TRIES, settings_of, whole_millisecond
from app.load.seeds import Crowd
from app.load.summary import Figures
from app.local.processes import Child, wait_for_line
from app.store import load_measure, load_seed
from app.store.load_measure import EndedRuns
from app.store.load_seed import SeededRun
from app.store.pool import Connection

LOOK_EVERY = 0.1
STALL = timedelta(seconds=60)
BEFORE = timedelta(milliseconds=200)
"""The counters are read so long before the runs become due."""
FAR = timedelta(days=365)
"""The schedules' own next fire: no planner runs, and none would be needed."""


@dataclass(frozen=True, slots=True)
class Claims:
    """How many of what; `executors` are processes of `app.load.worker`."""

    runs: int
    tenants: int
    executors: int = 2


async def measure(place: Place, claims: Claims, show: Show) -> Figures:
    """One drain of a backlog. Raises CarillonError when it cannot be carried out."""
    settings_of(place)  # a wrong setting is told before anything is started
    workers = [
        place.launch(f"worker-{number}", [sys.executable, "-m", "app.load.worker"])
        for number in range(1, claims.executors + 1)
    ]
    try:
        for worker in workers:
            await wait_for_line(worker, "ready", within=READY_WITHIN)
        async with place.connection("load watch", enable_seqscan="off") as conn:
            due_at = await _seed(place, conn, claims, show)
            left = due_at - BEFORE - await load_measure.clock(conn)
            await asyncio.sleep(max(0.0, left.total_seconds()))
            meter = await Meter.read(conn, _measured(place, workers))
            show.step("claiming and settling")
            with show.bar("settled", claims.runs):
                await _until_ended(place, conn, due_at)
            costs = await meter.costs(conn)
            ended = await load_measure.ended(conn, due_at, due_at)
            attempts = await load_measure.attempts(conn, due_at, due_at)
    finally:
        place.stop(workers)
    return _figures(place, claims, due_at, ended, attempts, costs)


def _measured(place: Place, workers: list[Child]) -> Processes:
    known = place.measured([])
    return Processes({**known.single, "executor": tuple(worker.pid for worker in workers)}, known.trees)


async def _seed(place: Place, conn: Connection, claims: Claims, show: Show) -> datetime:
    """Copy schedules with one planned run each, all due at the instant returned, which is still to come."""
    lead = LEAD + timedelta(seconds=2 * claims.runs / SEEDED_PER_SECOND)
    for _ in range(TRIES):
        show.step(f"seeding {claims.runs:,} runs of {claims.tenants:,} tenants")
        await load_seed.clear(conn)
        now = await load_measure.clock(conn)
        due_at = whole_millisecond(now + lead)
        await load_seed.copy_tenants(conn, seeds.tenant_ids(claims.tenants), at=now)
        owners = list(Crowd(claims.runs, claims.tenants).at(now + FAR, "http://127.0.0.1:9"))
        await load_seed.copy_schedules(conn, owners, expires_after=seeds.EXPIRES_AFTER, at=now)
        runs = [SeededRun(run_id(one.id, due_at), due_at, one.tenant_id, one.id) for one in owners]
        await load_seed.copy_runs(conn, runs, max_attempts=5, expires_after=seeds.EXPIRES_AFTER, at=now)
        if place.postgres_pid is not None:
            await load_seed.checkpoint(conn)
        if await load_measure.clock(conn) + BEFORE < due_at:
            return due_at
        lead *= 2
    raise CarillonError(f"{claims.runs:,} runs could not be seeded in time, even with a lead of {lead}")


async def _until_ended(place: Place, conn: Connection, due_at: datetime) -> None:
    """Wait until every run has ended; gives up when that takes absurdly long."""
    begun = time.monotonic()
    while await load_measure.is_open(conn, due_at):
        place.require_alive()
        if time.monotonic() - begun > STALL.total_seconds() * 10:
            return
        await asyncio.sleep(LOOK_EVERY)


def _figures(
    place: Place, claims: Claims, due_at: datetime, ended: EndedRuns, attempts: int, costs: Costs
) -> Figures:
    per_second = rate(ended.succeeded, due_at, ended.last_success_at)
    problems = [] if attempts == claims.runs else [f"{attempts:,} attempt rows for {claims.runs:,} runs"]
    return Figures(
        scenario="claims",
        claim_mode=place.wanted.claim_mode.value,
        schedules=claims.runs,
        tenants=claims.tenants,
        executors=claims.executors,
        expected=claims.runs,
        recorded=ended.succeeded,
        recorded_per_s=per_second,
        cpu_us_per_run=costs.cpu_us_per_run(claims.runs),
        wal_bytes_per_run=costs.wal_bytes / claims.runs,
        statements_per_run=costs.statements_per_run(claims.runs),
        statements=costs.busiest_statements(claims.runs),
        transactions_per_run=costs.transactions / claims.runs,
        others_cpu_share=costs.others_share,
        stolen_cpu_share=costs.stolen_share,
        own={"claim_settle_per_s": per_second, "attempt_rows": attempts},
        problems=problems,
    )
