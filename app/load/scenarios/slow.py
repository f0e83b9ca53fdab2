"""`slow`: thousands of deliveries in flight to targets that take seconds: what claims and memory notice of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from uuid import UUID

import httpx

from app.claim.grant import Grants
from app.domain.ids import run_id
from app.load import cpu
from app.load.counting import figures_of
from app.load.lateness import Lateness
from app.load.ledger import Ledger, lateness_of
from app.load.place import Place
from app.load.progress import Show
from app.load.replica import Replica, metric, probe_client
from app.load.round import play
from app.load.seeds import EXPIRES_AFTER, Crowd, delivery_key
from app.load.stage import Fleet, Outcome, Stage
from app.load.summary import Figures
from app.store import load_measure, load_seed
from app.store.claims import LEFT_END, Cursor
from app.store.load_seed import SeededRun, SeededSchedule
from app.store.pool import PLAN_GUARDS, Connection, close, connect

SECOND = timedelta(seconds=1)
SPARE_SLOTS = 300
"""Slots of each executor beyond the slow runs, for the quick ones."""
PROBE_LIMIT = 100
PROBE_EVERY = 0.1
PROBED_RUNS = 400
"""Planned runs of the far future, for which only the probe's claims are early enough."""
PROBE_AHEAD = timedelta(hours=1)
FULL = 0.95
"""Claims and memory are taken for those under load while at least this part of the slow runs is in flight."""


@dataclass(frozen=True, slots=True)
class Slow:
    """`targets` runs that take `delay` each, all due at one instant, beside `quick_rate` quick ones a second."""

    targets: int
    delay: timedelta
    quick_rate: int
    tenants: int
    executors: int = 2
    planners: int = 1

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.planners, self.executors)

    @property
    def slow_after(self) -> timedelta:
        return 15 * SECOND

    @property
    def seconds(self) -> int:
        """Until the slow ones have had their time, and some."""
        return math.ceil((self.slow_after + self.delay) / SECOND) + 5

    def settings(self) -> dict[str, str]:
        """Room for everything at once, and deadlines that let it last."""
        timeout = math.ceil(2 * self.delay / SECOND) + 20
        return {
            "executor_slots": str(math.ceil(self.targets / self.executors) + SPARE_SLOTS),
            "executor_delivery_timeout": f"{timeout}s",
            "executor_drain_grace": f"{timeout + 10}s",
        }


@dataclass(slots=True)
class Seen:
    """What was watched: claim times in seconds while nothing was slow and while (nearly) everything was, the executors'
    memory before, and at the moment with the most runs in flight.

    Claims are behind the cursor, as nearly all of a claimer's are; sweeps from the left end, over all that is leased.
    """

    claims_before: list[float] = field(default_factory=list)
    claims_during: list[float] = field(default_factory=list)
    sweeps_before: list[float] = field(default_factory=list)
    sweeps_during: list[float] = field(default_factory=list)
    memory_before: int | None = None
    memory_at_most: int | None = None
    most_in_flight: int = 0
    full_from: datetime | None = None
    full_until: datetime | None = None


async def measure(place: Place, slow: Slow, show: Show) -> Figures:
    """One stretch. Raises CarillonError when it cannot be carried out."""
    roomy = place.with_settings(**slow.settings())
    seen = Seen()
    cursor = LEFT_END
    slow_keys: set[bytes] = set()
    slow_url = ""

    async def prepare(stage: Stage) -> None:
        nonlocal slow_url, cursor
        milliseconds = slow.delay / timedelta(milliseconds=1)
        target = await stage.place.launch_target("--delay-ms", f"{milliseconds:.0f}")
        stage.others.append(target)
        slow_url = target.url
        cursor = await _seed_probed(stage.conn)

    def make(first: datetime, url: str) -> list[SeededSchedule]:
        quick = Crowd(slow.quick_rate * slow.seconds, slow.tenants, apart=SECOND / slow.quick_rate)
        lazy = Crowd(slow.targets, slow.tenants, seed=2)
        slow_ones = list(lazy.at(first + slow.slow_after, slow_url or url))
        slow_keys.clear()
        slow_keys.update(map(delivery_key, slow_ones))
        return [*quick.at(first, url), *slow_ones]

    outcome = await play(
        roomy,
        slow.fleet,
        make,
        show,
        tenants=slow.tenants,
        before=prepare,
        accident=lambda stage, first: _watch(stage, first, slow, seen, cursor),
    )
    return _figures(roomy, slow, outcome, seen, slow_keys)


async def _seed_probed(conn: Connection) -> Cursor:
    """Planned runs that are due only when everything is over, and the place in the due order just before them."""
    now = await load_measure.clock(conn)
    owners = list(Crowd(PROBED_RUNS, 1, seed=3).at(now + PROBE_AHEAD / 2, "http://127.0.0.1:9"))
    runs = [SeededRun(run_id(o.id, o.next_fire_at), o.next_fire_at, o.tenant_id, o.id) for o in owners]
    await load_seed.copy_runs(conn, runs, max_attempts=1, expires_after=EXPIRES_AFTER, at=now)
    return Cursor(runs[0].scheduled_for - SECOND, UUID(int=0))


async def _watch(stage: Stage, first: datetime, slow: Slow, seen: Seen, cursor: Cursor) -> None:
    """Probe claims, memory and runs in flight until cancelled."""
    executors = [replica for replica in stage.replicas if replica.part == "executor"]
    grants = Grants("load-probe", timedelta(seconds=30))
    guarded = await connect(
        stage.place.dsn, application_name="carillon load probe", settings={**PLAN_GUARDS, "jit": "off"}
    )
    try:
        async with probe_client() as client:
            while True:
                claim, claimed = await load_measure.time_claim(
                    guarded, grants.new(), limit=PROBE_LIMIT, ahead=PROBE_AHEAD, behind=cursor
                )
                sweep, swept = await load_measure.time_claim(
                    guarded, grants.new(), limit=PROBE_LIMIT, ahead=PROBE_AHEAD
                )
                now = await load_measure.clock(guarded)
                if claimed == swept == PROBE_LIMIT:
                    await _note(seen, client, executors, slow, took=(claim, sweep), now=now, first=first)
                await asyncio.sleep(PROBE_EVERY)
    finally:
        await close(guarded)


async def _note(
    seen: Seen,
    client: httpx.AsyncClient,
    executors: Sequence[Replica],
    slow: Slow,
    *,
    took: tuple[float, float],
    now: datetime,
    first: datetime,
) -> None:
    claim, sweep = took
    memory = sum(cpu.resident_bytes(replica.child.pid) for replica in executors)
    if now < first + slow.slow_after:
        if now > first + 2 * SECOND:  # when the quick ones have begun to flow
            seen.claims_before.append(claim)
            seen.sweeps_before.append(sweep)
            seen.memory_before = memory
        return
    in_flight = int(sum([await metric(client, replica, "in_flight") for replica in executors]))
    if in_flight > seen.most_in_flight:
        seen.most_in_flight, seen.memory_at_most = in_flight, memory
    if in_flight >= FULL * slow.targets:
        seen.claims_during.append(claim)
        seen.sweeps_during.append(sweep)
        seen.full_from = seen.full_from or now
        seen.full_until = now


def _figures(place: Place, slow: Slow, outcome: Outcome, seen: Seen, slow_keys: set[bytes]) -> Figures:
    figures = figures_of(
        "slow", outcome, slow.fleet, claim_mode=place.wanted.claim_mode.value, tenants=slow.tenants
    )
    before, during = _claim_ms(seen.claims_before), _claim_ms(seen.claims_during)
    per_run = None
    if seen.memory_before is not None and seen.memory_at_most is not None and seen.most_in_flight:
        per_run = (seen.memory_at_most - seen.memory_before) / seen.most_in_flight
    problems = list(figures.problems)
    if seen.full_from is None:
        problems.append(
            f"only {seen.most_in_flight:,} of {slow.targets:,} slow runs were in flight at once: "
            "the figures under load are missing (a longer --delay-seconds gives them more time)"
        )
    quick = outcome.due_ns.keys() - slow_keys
    return replace(
        figures,
        # Over a stretch these say when it ended, not what could be reached.
        planned_per_s=None,
        delivered_per_s=None,
        recorded_per_s=None,
        own={
            **figures.own,
            "slow_targets": slow.targets,
            "delay_seconds": slow.delay / SECOND,
            "most_in_flight": seen.most_in_flight,
            "memory_bytes_per_run_in_flight": per_run,
            "claim_ms": {"before": before, "during": during},
            "sweep_ms": {"before": _claim_ms(seen.sweeps_before), "during": _claim_ms(seen.sweeps_during)},
            "claim_p99_ratio": during["p99"] / before["p99"] if during["p99"] and before["p99"] else None,
            "quick": {
                "before_p99_ms": _quick_p99(outcome, quick, outcome.first, outcome.first + slow.slow_after),
                "during_p99_ms": _quick_p99(outcome, quick, seen.full_from, seen.full_until),
            },
        },
        problems=problems,
    )


def _claim_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"count": float(len(seconds))}
    return found | Lateness(int(one * 1e9) for one in seconds).percentiles()


def _quick_p99(
    outcome: Outcome, keys: set[bytes], since: datetime | None, until: datetime | None
) -> float | None:
    ledger: Ledger | None = outcome.ledger
    if ledger is None or since is None or until is None:
        return None
    begin, end = (int(instant.timestamp() * 1e9) for instant in (since, until))
    due = {key: outcome.due_ns[key] for key in keys if begin <= outcome.due_ns[key] < end}
    return lateness_of(ledger.first, due, offset_ns=outcome.offset.ns).percentiles()["p99"]
