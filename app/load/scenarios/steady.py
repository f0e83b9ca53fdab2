"""`steady`: so many schedules a second for a while, beside any number of idle ones, and what idling costs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta

from app.load.costs import Costs, Meter
from app.load.counting import figures_of
from app.load.place import Place
from app.load.progress import Show
from app.load.round import play
from app.load.seeds import EXPIRES_AFTER, Crowd, tenant_ids
from app.load.stage import Fleet, Stage
from app.load.summary import Figures
from app.store import load_measure, load_seed

IDLE_FROM = timedelta(days=1)
IDLE_OVER = timedelta(days=300)
"""Idle schedules are due from a day on, spread over so long: the index of due schedules is as large as it would be."""
SETTLE = timedelta(seconds=3)
"""After seeding, before the idle cost is measured: what the servers still have to tidy up is not idling."""


@dataclass(frozen=True, slots=True)
class Steady:
    """`rate` schedules a second for `seconds`, beside `idle_schedules`; idling is measured for `idle_seconds`."""

    rate: int
    seconds: int
    idle_schedules: int
    idle_seconds: int
    tenants: int
    executors: int = 2
    planners: int = 1

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.planners, self.executors)

    @property
    def busy(self) -> Crowd:
        return Crowd(self.rate * self.seconds, self.tenants, apart=timedelta(seconds=1) / self.rate)

    @property
    def idle(self) -> Crowd:
        apart = IDLE_OVER / max(1, self.idle_schedules)
        return Crowd(self.idle_schedules, self.tenants, self.tenants + 1, apart=apart, seed=2)


async def measure(place: Place, steady: Steady, show: Show) -> Figures:
    """One stretch. Raises CarillonError when it cannot be carried out."""
    idle: list[Costs] = []

    async def idle_first(stage: Stage) -> None:
        await _seed_idle(stage, steady, show)
        if steady.idle_seconds:
            idle.append(await _idle(stage, steady.idle_seconds, show))

    outcome = await play(
        place,
        steady.fleet,
        lambda first, url: list(steady.busy.at(first, url)),
        show,
        tenants=steady.tenants,
        before=idle_first,
    )
    figures = figures_of(
        "steady", outcome, steady.fleet, claim_mode=place.wanted.claim_mode.value, tenants=steady.tenants
    )
    return replace(
        figures,
        # Over a stretch these say when it ended, not what could be reached.
        planned_per_s=None,
        delivered_per_s=None,
        recorded_per_s=None,
        own={
            **figures.own,
            "rate": steady.rate,
            "seconds": steady.seconds,
            "idle_schedules": steady.idle_schedules,
            "idle_cpu_percent": _percent(idle[0]) if idle else None,
            "idle_cpu_percent_by_part": _percents(idle[0]) if idle else None,
            "idle_seconds": steady.idle_seconds,
            "idle_wal_bytes_per_s": idle[0].wal_bytes / idle[0].seconds if idle else None,
            "busy_cpu_percent": _percent(outcome.costs),
        },
    )


async def _seed_idle(stage: Stage, steady: Steady, show: Show) -> None:
    """Copy the idle schedules, and vacuum as has long happened where so many have come one by one."""
    if not steady.idle_schedules:
        return
    show.step(f"seeding {steady.idle_schedules:,} idle schedules")
    conn = stage.conn
    now = await load_measure.clock(conn)
    owners = tenant_ids(steady.tenants, first_tenant=steady.tenants + 1)
    await load_seed.copy_tenants(conn, owners, at=now)
    await load_seed.copy_schedules(
        conn, steady.idle.at(now + IDLE_FROM, stage.target.url), expires_after=EXPIRES_AFTER, at=now
    )
    await load_seed.vacuum_schedules(conn)
    if stage.place.postgres_pid is not None:
        await load_seed.checkpoint(conn)


async def _idle(stage: Stage, seconds: int, show: Show) -> Costs:
    """What the fleet and the database use while nothing is due."""
    await asyncio.sleep(SETTLE.total_seconds())
    show.step(f"idling for {seconds} s")
    meter = await Meter.read(stage.conn, stage.place.measured(stage.replicas))
    await asyncio.sleep(seconds)
    return await meter.costs(stage.conn)


def _percent(costs: Costs) -> float | None:
    """Percent of one core, all measured parts together; None where the database's own part is not known."""
    return 100 * costs.cpu.ours / costs.seconds if "postgres" in costs.cpu.parts else None


def _percents(costs: Costs) -> dict[str, float]:
    return {part: 100 * seconds / costs.seconds for part, seconds in costs.cpu.parts.items()}
