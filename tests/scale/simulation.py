"""A burst on more machines than there are here: an event simulation with measured service times.

Every piece of work is a batch with a CPU cost and a machine. A machine works off what it is given in the order of
arrival, on as many cores as it has; a process does one thing at a time. Nothing else is modelled: no locks, no network
but the target's own latency, one flush to disk per statement. So it says where the CPU time that was measured in one
place would go in another, which is what `docs/scale.md` uses it for, and not what a disk or a lock would do there.

    planner      locks and writes batches of schedules during the look-ahead; late ones become due late
    executor     claims at most its idle slots, works on each run, settles in groups
    database     plans, claims and settles for everybody, on its own machine or on everybody's
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

US = 1e-6
STATEMENT = 300 * US
"""Seconds that a statement takes beside its rows: parsing, planning, the way there and back."""


@dataclass(frozen=True, slots=True)
class Service:
    """CPU microseconds per run, as a load run measures them (`cpu_us_per_run`), the database's share split by verb."""

    planner: float
    database_plan: float
    database_claim: float
    database_settle: float
    executor: float
    receiver: float = 0.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """`executor_cores` and `database_cores`: of their own machines; None for `executor_cores` means one machine for
    all, receiver included. `flush` and `target` are seconds: one commit's flush, one answer of the target."""

    executors: int
    database_cores: int
    executor_cores: int | None = None
    planners: int = 1
    plan_abreast: int = 2
    slots: int = 400
    batch: int = 200
    plan_batch: int = 1000
    lookahead: float = 5.0
    flush: float = 0.002
    target: float = 0.001


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds after the instant. `planned_at` below 0: everything was planned in time."""

    runs: int
    planned_at: float
    recorded_at: float
    lateness_p50: float
    lateness_p99: float

    @property
    def recorded_per_s(self) -> float:
        return self.runs / self.recorded_at


class _Clock:
    """Calls what is due, in order of time."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._order), call))

    def run(self) -> None:
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class _Machine:
    """Cores, and the work that waits for one."""

    def __init__(self, clock: _Clock, cores: int) -> None:
        self._clock = clock
        self._free = [clock.now] * cores
        heapq.heapify(self._free)

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        begin = max(heapq.heappop(self._free), self._clock.now)
        heapq.heappush(self._free, begin + seconds)
        self._clock.after(begin + seconds - self._clock.now, then)


@dataclass(slots=True)
class _Burst:
    """What all processes share: the runs that are planned, claimed and done, and the machines they run on."""

    fleet: Fleet
    service: Service
    runs: int
    clock: _Clock
    database: _Machine
    hosts: _Machine
    to_plan: int = 0
    due: int = 0
    planned_at: float = 0.0
    recorded_at: float = 0.0
    settled: int = 0
    sent: list[tuple[float, int]] = field(default_factory=list)
    idle: list[_Executor] = field(default_factory=list)

    def statement(self, rows: int, each: float, then: Callable[[], None]) -> None:
        """One statement of the database, and its commit."""
        seconds = STATEMENT + rows * each * US
        self.database.work(seconds, lambda: self.clock.after(self.fleet.flush, then))

    def become_due(self, rows: int) -> None:
        self.due += rows
        waiting, self.idle = self.idle, []
        for executor in waiting:
            executor.claim()


class _Planner:
    """Batch after batch: compute, write, commit. A process has several under way, since it mostly waits."""

    def __init__(self, burst: _Burst) -> None:
        self._burst = burst

    def plan(self) -> None:
        burst = self._burst
        rows = min(burst.fleet.plan_batch, burst.to_plan)
        if rows == 0:
            return
        burst.to_plan -= rows

        def planned() -> None:
            burst.planned_at = burst.clock.now
            burst.clock.after(max(0.0, -burst.clock.now), lambda: burst.become_due(rows))
            self.plan()

        def written() -> None:
            burst.statement(rows, burst.service.database_plan, planned)

        burst.hosts.work(rows * burst.service.planner * US, written)


class _Executor:
    """One process: claims while slots are idle, works on one batch at a time, settles one group at a time."""

    def __init__(self, burst: _Burst) -> None:
        self._burst = burst
        self._free = burst.fleet.slots
        self._is_claiming = self._is_working = self._is_settling = False
        self._to_send: list[int] = []
        self._to_settle = 0

    def claim(self) -> None:
        burst = self._burst
        if self._is_claiming or self._free < min(burst.fleet.batch, burst.fleet.slots // 4):
            return
        rows = min(self._free, burst.fleet.batch, burst.due)
        if rows == 0:
            burst.idle.append(self)
            return
        burst.due -= rows
        self._free -= rows
        self._is_claiming = True

        def claimed() -> None:
            self._is_claiming = False
            self._to_send.append(rows)
            self._work()
            self.claim()

        burst.statement(rows, burst.service.database_claim, claimed)

    def _work(self) -> None:
        if self._is_working or not self._to_send:
            return
        self._is_working = True
        rows = self._to_send.pop(0)
        burst = self._burst

        def worked() -> None:
            self._is_working = False
            burst.sent.append((burst.clock.now, rows))
            burst.clock.after(burst.fleet.target, lambda: self._answered(rows))
            self._work()

        burst.hosts.work(rows * (burst.service.executor + burst.service.receiver) * US, worked)

    def _answered(self, rows: int) -> None:
        self._to_settle += rows
        self._settle()

    def _settle(self) -> None:
        if self._is_settling or not self._to_settle:
            return
        self._is_settling = True
        rows, self._to_settle = self._to_settle, 0
        burst = self._burst

        def settled() -> None:
            self._is_settling = False
            self._free += rows
            burst.settled += rows
            burst.recorded_at = burst.clock.now
            self._settle()
            self.claim()

        burst.statement(rows, burst.service.database_settle, settled)


def simulate(runs: int, fleet: Fleet, service: Service) -> Result:
    """A burst of `runs` schedules at instant 0, from the beginning of its planning to its last settlement."""
    clock = _Clock(-fleet.lookahead)
    database = _Machine(clock, fleet.database_cores)
    hosts = database if fleet.executor_cores is None else _Machine(clock, fleet.executor_cores)
    burst = _Burst(fleet, service, runs, clock, database, hosts, to_plan=runs)
    burst.idle = [_Executor(burst) for _ in range(fleet.executors)]
    for planner in [_Planner(burst) for _ in range(fleet.planners * fleet.plan_abreast)]:
        planner.plan()
    clock.run()
    assert burst.settled == runs, "the simulation lost runs"
    return Result(runs, burst.planned_at, burst.recorded_at, *_lateness(burst.sent, (0.5, 0.99)))


def _lateness(sent: list[tuple[float, int]], shares: tuple[float, float]) -> tuple[float, float]:
    """The lateness that these shares of the runs stayed below. Batches are sent in order of time."""
    total = sum(rows for _, rows in sent)
    found: list[float] = []
    seen = 0
    for at, rows in sorted(sent):
        seen += rows
        while len(found) < len(shares) and seen >= shares[len(found)] * total:
            found.append(at)
    return found[0], found[1]
