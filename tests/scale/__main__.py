"""`python -m tests.scale`: the tables of docs/scale.md, from the measured service times."""

# ruff: noqa: T201 - what it prints is what it is for

from __future__ import annotations

import sys
from itertools import product

from tests.scale.measured import SERVICE
from tests.scale.simulation import Fleet, simulate

MILLION = 1_000_000
LOOKAHEAD = 60.0
EXECUTORS = (2, 8, 16, 32, 64)
DATABASE_CORES = (8, 16, 32)


def main() -> int:
    """A million schedules on the hour: how long until all are recorded, by executors and cores of the database."""
    print(f"{MILLION:,} runs, look-ahead {LOOKAHEAD:g} s, one core for each executor, four planners")
    print(
        "| executors | cores of the database | planned before the instant | all recorded after | runs/s | p99 |"
    )
    print("|---|---|---|---|---|---|")
    for executors, cores in product(EXECUTORS, DATABASE_CORES):
        fleet = Fleet(
            executors=executors,
            executor_cores=executors,
            database_cores=cores,
            planners=4,
            lookahead=LOOKAHEAD,
        )
        found = simulate(MILLION, fleet, SERVICE)
        planned = (
            f"{-found.planned_at:.0f} s" if found.planned_at < 0 else f"no, {found.planned_at:.0f} s late"
        )
        print(
            f"| {executors} | {cores} | {planned} | {found.recorded_at:.0f} s | {found.recorded_per_s:,.0f} "
            f"| {found.lateness_p99:.0f} s |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
