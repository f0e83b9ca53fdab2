"""`planner`: how many schedules a second become runs; nobody claims them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.load.counting import figures_of
from app.load.place import Place
from app.load.progress import Show
from app.load.round import play
from app.load.seeds import Crowd
from app.load.stage import Fleet, Outcome
from app.load.summary import Figures


@dataclass(frozen=True, slots=True)
class Planning:
    """How many of what."""

    schedules: int
    tenants: int
    planners: int = 1


async def measure(place: Place, planning: Planning, show: Show) -> Figures:
    """One stretch of planning. Raises CarillonError when it cannot be carried out."""
    fleet = Fleet(planning.planners, executors=0)
    outcome = await play(
        place,
        fleet,
        lambda first, url: list(Crowd(planning.schedules, planning.tenants).at(first, url)),
        show,
        tenants=planning.tenants,
    )
    figures = figures_of(
        "planner", outcome, fleet, claim_mode=place.wanted.claim_mode.value, tenants=planning.tenants
    )
    return replace(
        figures,
        # Nothing is to be delivered here.
        executors=0,
        expected=None,
        delivered=None,
        recorded=None,
        duplicates=None,
        missing=None,
        lateness_curve=(),
        own={
            "planners": planning.planners,
            "planned": outcome.planned.runs,
            "planner_batches": outcome.planned.batches,
            "planned_within_lookahead": _is_in_time(outcome),
        },
        problems=_problems(planning, outcome),
    )


def _is_in_time(outcome: Outcome) -> bool:
    """Whether every run was there before its instant."""
    return outcome.planned_seen_at is not None and outcome.planned_seen_at <= outcome.first


def _problems(planning: Planning, outcome: Outcome) -> list[str]:
    problems: list[str] = []
    if outcome.planned.runs != planning.schedules:
        problems.append(f"{outcome.planned.runs:,} of {planning.schedules:,} schedules got their run")
    if outcome.planned_seen_at is None:
        problems.append("some schedules were never advanced")
    return problems
