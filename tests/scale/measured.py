"""The measured point that the simulation stands on: one burst of `carillon load`, and what it cost.

100,000 schedules of 1,000 tenants due at one instant, two executor processes and one planner on two cores that also
carried PostgreSQL 18.6 (all durability on) and the receiver; CPython 3.11.2, December 2026. The database's time is
split by the shares of its statements in the same run (`statements` of the summary).
"""

from __future__ import annotations

from tests.scale.simulation import Fleet, Service

RUNS = 100_000
FLEET = Fleet(executors=2, database_cores=2, slots=400, batch=200)
RECORDED_PER_S = 5_854
PLANNED_PER_S = 14_567
LATENESS_P99 = 16.9

SERVICE = Service(
    planner=30.5,
    database_plan=71.0,
    database_claim=37.5,
    database_settle=65.0,
    executor=170.3,
    receiver=24.3,
)
