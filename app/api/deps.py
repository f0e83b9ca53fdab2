"""What the API is given by the composition root, and how a route gets at it. There is no other state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from fastapi import Request

from app.domain.address import AddressPolicy
from app.domain.plan import Limits
from app.domain.run import RunRef
from app.loops import LoopHealth
from app.settings import ApiSettings
from app.store.pool import Pool


@dataclass(frozen=True, slots=True)
class ApiDeps:
    """`planner_patience` is how old the planner's last success may be for this replica to count as ready;
    None where the planner does not run. `lookahead` is how far ahead runs are planned, and so shown by
    default. `limits` are those by which an edit
    plans what was due before it. `announce` is told of runs that the API itself has made, after the commit.
    """

    pool: Pool
    settings: ApiSettings
    health: LoopHealth
    address_policy: AddressPolicy
    announce: Callable[[Sequence[RunRef]], Awaitable[None]]
    is_draining: Callable[[], bool]
    planner_patience: timedelta | None
    lookahead: timedelta
    limits: Limits
    version: str


def deps_of(request: Request) -> ApiDeps:
    deps = request.app.state.deps
    assert isinstance(deps, ApiDeps)
    return deps
