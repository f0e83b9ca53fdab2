"""What an executor must know of a schedule to deliver its runs, and which runs overlap an earlier one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.domain import retry as retry_policy
from app.domain import target as targets
from app.domain.ids import RunId, ScheduleId
from app.domain.retry import RetryPolicy
from app.domain.run import ClaimedRun
from app.domain.target import Target
from app.store.pool import Connection


@dataclass(frozen=True, slots=True)
class Order:
    """One version of a schedule as the executor carries it out. Without a target, `problem` says why."""

    schedule_id: ScheduleId
    version: int
    name: str
    target: Target | None
    retry: RetryPolicy
    skips_overlap: bool
    problem: str | None = None


READ_ORDERS = """SELECT s.id, s.version, s.name, s.target, s.retry, s.overlap = 'skip'
  FROM unnest($1::uuid[]) AS g(id)
  JOIN schedule AS s ON s.id = g.id"""


async def read_orders(conn: Connection, schedules: Collection[ScheduleId]) -> list[Order]:
    """The current orders, unknown schedules left out; a row that cannot be read is an Order with a problem."""
    rows = await conn.fetch(READ_ORDERS, sorted(schedules))
    orders = []
    for schedule_id, version, name, target_text, retry_text, skips_overlap in rows:
        target: Target | None = None
        retry = RetryPolicy()
        problem = None
        try:
            retry = retry_policy.from_json(retry_text)
            target = targets.from_json(target_text)
        except Exception as error:  # noqa: BLE001 one unreadable row must not hold up the others of its claim
            problem = f"the stored target or retry policy cannot be read ({type(error).__name__})"
        orders.append(Order(ScheduleId(schedule_id), version, name, target, retry, skips_overlap, problem))
    return orders


# One pass over the tenants' part of the claim index, whose size is their open runs. Asked for each run on its own it
# would be walked a hundred times per claim, and the guard index would walk each schedule's whole history.
OVERLAPPING = """SELECT g.id
  FROM unnest($1::uuid[], $2::timestamptz[], $4::uuid[]) AS g(id, scheduled_for, schedule_id)
  JOIN (SELECT r.schedule_id, min(r.scheduled_for) AS first_open
          FROM job_run AS r
         WHERE r.tenant_id = ANY($3::uuid[])
           AND r.status IN ('pending', 'retrying')
           AND r.schedule_id = ANY($4::uuid[])
         GROUP BY r.schedule_id) AS open ON open.schedule_id = g.schedule_id
 WHERE open.first_open < g.scheduled_for"""


async def overlapping(conn: Connection, runs: Sequence[ClaimedRun]) -> set[RunId]:
    """Those of `runs` whose schedule has an earlier open run. The order decides, so two replicas agree."""
    rows = await conn.fetch(
        OVERLAPPING,
        [run.lease.ref.id for run in runs],
        [run.lease.ref.scheduled_for for run in runs],
        list({run.lease.ref.tenant_id for run in runs}),
        [run.schedule_id for run in runs],
    )
    return {RunId(row[0]) for row in rows}
