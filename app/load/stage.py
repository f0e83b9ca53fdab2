"""What a round consists of: who plays, what may happen meanwhile, and what it has brought."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Any

from app.load.clock import ClockOffset
from app.load.costs import Costs
from app.load.ledger import Ledger
from app.load.place import Place, Target
from app.load.replica import Replica
from app.store.load_measure import EndedRuns, PlannedRuns
from app.store.load_seed import SeededSchedule
from app.store.pool import Connection


class History(Enum):
    """What becomes of what earlier rounds have left."""

    CLEARED = auto()
    KEPT = auto()


Seeds = Callable[[datetime, str], Sequence[SeededSchedule]]
"""The schedules of a round, given the first instant and the target's URL."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many processes of each role; `target_options` are those of `app.load.target`.

    Without executors a round is over when everything is planned.
    """

    planners: int = 1
    executors: int = 2
    target_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round has brought. Instants by the database's clock, `ledger` by the target's, `offset` between them; None
    when the target keeps no ledger.

    `due_ns` has every expected delivery: its key and its instant.
    """

    first: datetime
    last: datetime
    due_ns: dict[bytes, int]
    planned: PlannedRuns
    planned_seen_at: datetime | None
    ended: EndedRuns
    succeeded: frozenset[bytes]
    ledger: Ledger | None
    offset: ClockOffset
    costs: Costs
    planned_series: dict[int, int]
    recorded_series: dict[int, int]


@dataclass(frozen=True, slots=True)
class Stage:
    """A fleet that is ready, and its target: what a scenario may watch or disturb while a round runs.

    Further targets that a scenario starts stand in `others`: what they receive counts too.
    """

    place: Place
    target: Target
    replicas: list[Replica]
    conn: Connection
    others: list[Target] = field(default_factory=list)

    @property
    def targets(self) -> list[Target]:
        return [self.target, *self.others]


Before = Callable[[Stage], Coroutine[Any, Any, None]]
"""Done with the fleet running, before the round's own schedules are there."""
Accident = Callable[[Stage, datetime], Coroutine[Any, Any, None]]
"""Something that happens while a round runs, whose first instant it is told; begun when the schedules are seeded,
cancelled at the end."""
