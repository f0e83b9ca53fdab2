"""`burst`: many schedules of many tenants, all due at one instant."""

from __future__ import annotations

from dataclasses import dataclass

from app.load.counting import figures_of
from app.load.place import Place
from app.load.progress import Show
from app.load.round import play
from app.load.seeds import Crowd
from app.load.stage import Accident, Fleet
from app.load.summary import Figures


@dataclass(frozen=True, slots=True)
class Burst:
    """How many of what."""

    schedules: int
    tenants: int
    executors: int = 2
    planners: int = 1

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.planners, self.executors)


async def measure(place: Place, burst: Burst, show: Show, *, accident: Accident | None = None) -> Figures:
    """One burst. Raises CarillonError when it cannot be carried out."""
    outcome = await play(
        place,
        burst.fleet,
        lambda first, url: list(Crowd(burst.schedules, burst.tenants).at(first, url)),
        show,
        tenants=burst.tenants,
        accident=accident,
    )
    return figures_of(
        "burst", outcome, burst.fleet, claim_mode=place.wanted.claim_mode.value, tenants=burst.tenants
    )
