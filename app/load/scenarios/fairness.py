"""`fairness`: what many quiet tenants notice of one tenant's burst, against what they see alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from app.load.counting import figures_of
from app.load.lateness import Lateness
from app.load.ledger import lateness_of
from app.load.place import Place
from app.load.progress import Show
from app.load.round import play
from app.load.seeds import Crowd, delivery_key, instant_ns
from app.load.stage import Fleet, Outcome
from app.load.summary import Figures
from app.store.load_seed import SeededSchedule


@dataclass(frozen=True, slots=True)
class Fairness:
    """`quiet_tenants` with `quiet_rate` schedules a second together for `seconds`; a fifth of the way in, another
    tenant's `burst` schedules are due at one instant."""

    quiet_tenants: int
    quiet_rate: int
    seconds: int
    burst: int
    executors: int = 2
    planners: int = 1

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.planners, self.executors)

    @property
    def quiet(self) -> Crowd:
        apart = timedelta(seconds=1) / self.quiet_rate
        return Crowd(self.quiet_rate * self.seconds, self.quiet_tenants, apart=apart)

    @property
    def noisy(self) -> Crowd:
        return Crowd(self.burst, 1, self.quiet_tenants + 1, seed=2)

    @property
    def burst_after(self) -> timedelta:
        return timedelta(seconds=self.seconds) / 5


async def measure(place: Place, fairness: Fairness, show: Show) -> Figures:
    """The quiet tenants alone, then with the burst. Raises CarillonError when it cannot be carried out."""
    quiet_keys: set[bytes] = set()
    noisy_keys: set[bytes] = set()

    def alone(first: datetime, url: str) -> list[SeededSchedule]:
        return list(fairness.quiet.at(first, url))

    def together(first: datetime, url: str) -> list[SeededSchedule]:
        quiet = alone(first, url)
        noisy = list(fairness.noisy.at(first + fairness.burst_after, url))
        quiet_keys.clear()
        noisy_keys.clear()
        quiet_keys.update(map(delivery_key, quiet))
        noisy_keys.update(map(delivery_key, noisy))
        return [*quiet, *noisy]

    async def round_of(make: Callable[[datetime, str], list[SeededSchedule]]) -> Outcome:
        return await play(place, fairness.fleet, make, show, tenants=fairness.quiet_tenants + 1)

    show.step("the quiet tenants alone")
    solo = await round_of(alone)
    show.step(f"the same with another tenant's burst of {fairness.burst:,}")
    both = await round_of(together)
    figures = figures_of(
        "fairness",
        both,
        fairness.fleet,
        claim_mode=place.wanted.claim_mode.value,
        tenants=fairness.quiet_tenants + 1,
    )
    solo_p99 = _lateness(solo, set(solo.due_ns)).percentiles()["p99"]
    during = _during(both, quiet_keys, noisy_keys, instant_ns(both.first + fairness.burst_after))
    burst_p99 = _lateness(both, during).percentiles()["p99"]
    return replace(
        figures,
        # Over a stretch these say when it ended, not what could be reached.
        planned_per_s=None,
        delivered_per_s=None,
        recorded_per_s=None,
        own={
            **figures.own,
            "quiet": {
                "solo_p99_ms": solo_p99,
                "burst_p99_ms": burst_p99,
                "ratio": burst_p99 / solo_p99 if burst_p99 is not None and solo_p99 else None,
                "runs_during_burst": len(during),
                "tenants": fairness.quiet_tenants,
            },
            "noisy_lateness_ms": _lateness(both, noisy_keys).percentiles(),
        },
        problems=[
            *figures.problems,
            *([] if during else ["no quiet run was due while the burst lasted"]),
            *(
                f"alone: {problem}"
                for problem in figures_of(
                    "fairness", solo, fairness.fleet, claim_mode="", tenants=fairness.quiet_tenants
                ).problems
            ),
        ],
    )


def _lateness(outcome: Outcome, keys: set[bytes]) -> Lateness:
    first = {} if outcome.ledger is None else outcome.ledger.first
    there = {key: at for key, at in first.items() if key in keys}
    return lateness_of(there, outcome.due_ns, offset_ns=outcome.offset.ns)


def _during(outcome: Outcome, quiet: set[bytes], noisy: set[bytes], burst_ns: int) -> set[bytes]:
    """The quiet runs that were due from the burst's instant until its last delivery."""
    first = {} if outcome.ledger is None else outcome.ledger.first
    ended_ns = max((first[key] for key in noisy if key in first), default=burst_ns) - outcome.offset.ns
    return {key for key in quiet if burst_ns <= outcome.due_ns[key] <= ended_ns}
