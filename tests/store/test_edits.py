"""Edits lose no occurrence, invent none, and never take a lease away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from app.domain.ids import ScheduleId, run_id
from app.domain.recurrence import Cron, Every, Once, Recurrence
from app.domain.retry import RetryPolicy
from app.domain.schedule import Misfire, Overlap, Schedule, ScheduleChange, ScheduleStatus
from app.domain.target import Target
from app.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from app.planner.tick import plan_due
from app.settings import PlannerSettings
from app.store import edits, partitions, schedules
from app.store.edits import RunCancel
from app.store.pool import Connection, Pool, acquire, transaction
from tests import factories_schedules as make
from tests.frozen import FrozenClock

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


@pytest.fixture
async def now(frozen_clock: FrozenClock) -> datetime:
    return await make.mid_month(frozen_clock)


@pytest.fixture
async def conn(frozen_clock: FrozenClock, now: datetime) -> AsyncIterator[Connection]:
    """The API's connection, on the frozen clock."""
    async with acquire(frozen_clock.pool) as connection:
        yield connection


@pytest.fixture
async def planner(dsn: str, frozen_clock: FrozenClock) -> AsyncIterator[Pool]:
    async with make.planner_pool(dsn, clock=frozen_clock) as pool:
        yield pool


async def plan(pool: Pool) -> None:
    async def hear(_runs: object) -> None:
        return None

    await plan_due(pool, hear, PlannerSettings())


def starting(first: datetime, *, every: float) -> Schedule:
    return make.schedule(next_fire_at=first, recurrence=make.every(every, first))


async def statuses(conn: Connection, one: Schedule) -> list[tuple[datetime, str, str | None]]:
    return [(row["scheduled_for"], row["status"], row["reason"]) for row in await make.runs_of(conn, one)]


async def change(conn: Connection, one: Schedule, **fields: object) -> Schedule:
    return await edits.update(conn, one.tenant_id, one.id, ScheduleChange(**fields))  # type: ignore[arg-type]


# Edits in general


async def test_an_edit_that_changes_nothing_moves_nothing(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + 2 * SECOND, recurrence=make.every(60)))
    await plan(planner)
    before, runs = await make.plain(conn, one), await make.runs_of(conn, one)
    stored = await schedules.get(conn, one.tenant_id, one.id)
    assert (
        await change(conn, one, name=one.name, recurrence=make.every(60), misfire=Misfire.FIRE_ONCE) == stored
    )
    assert await make.plain(conn, one) == before
    assert await make.runs_of(conn, one) == runs


async def test_an_edit_is_written_and_counted(conn: Connection, now: datetime) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    target = Target("PUT", "https://example.org/", (), None)
    edited = await change(conn, one, name="new", target=target, misfire=Misfire.SKIP, overlap=Overlap.SKIP)
    assert edited == replace(
        one, name="new", target=target, misfire=Misfire.SKIP, overlap=Overlap.SKIP, version=2, updated_at=now
    )
    assert await schedules.get(conn, one.tenant_id, one.id) == edited


async def test_an_edit_against_another_version_is_refused(conn: Connection, now: datetime) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    await edits.update(conn, one.tenant_id, one.id, ScheduleChange(name="a"), expected_version=1)
    with pytest.raises(Conflict, match="version 1 was expected"):
        await edits.update(conn, one.tenant_id, one.id, ScheduleChange(name="b"), expected_version=1)
    with pytest.raises(Conflict, match="version 1 was expected"):
        await edits.delete(conn, one.tenant_id, one.id, expected_version=1)
    assert (await make.plain(conn, one))["name"] == "a"


async def test_foreign_unknown_and_deleted_ids_are_not_found_by_any_verb(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    gone = await make.given(conn, make.schedule(next_fire_at=None, status=ScheduleStatus.DELETED))
    before = await make.plain(conn, one)
    for tenant, id_ in ((make.tenant(), one.id), (one.tenant_id, uuid4()), (gone.tenant_id, gone.id)):
        for verb in (
            edits.update(conn, tenant, id_, ScheduleChange(name="x")),
            edits.pause(conn, tenant, id_),
            edits.resume(conn, tenant, id_),
            edits.delete(conn, tenant, id_),
            edits.run_now(conn, tenant, id_),
        ):
            with pytest.raises(NotFound):
                await verb
    assert await make.plain(conn, one) == before


async def test_an_edit_that_fails_changes_nothing_at_all(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now - 5 * SECOND, recurrence=make.every(60)))
    before = await make.plain(conn, one)
    with pytest.raises(InvalidInput) as refused:
        await change(conn, one, recurrence=Once(now))
    assert refused.value.field == "recurrence.at"
    assert await make.plain(conn, one) == before
    assert await make.runs_of(conn, one) == []


async def test_planned_runs_carry_the_version_that_applies_to_them(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now, recurrence=make.every(2, now)))
    await plan(planner)
    first, second, third = (row["id"] for row in await make.runs_of(conn, one))
    await make.lease(conn, third)
    await change(conn, one, retry=RetryPolicy(max_attempts=2), expires_after=HOUR)
    rows = {row["id"]: row for row in await make.runs_of(conn, one)}
    follows = rows[second]
    assert (follows["schedule_version"], follows["max_attempts"]) == (2, 2)
    assert follows["expires_at"] == follows["scheduled_for"] + HOUR
    for stays in (rows[first], rows[third]):  # due already; leased
        assert (stays["schedule_version"], stays["max_attempts"]) == (1, 5)


# A changed recurrence


async def test_a_changed_rule_starts_strictly_after_the_edit_and_fires_nothing_before(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    """kubernetes#123220: `0 21 * * 2,5` became `0 23 * * 3,0` on a Friday at 02:10, and a job started at
    once.
    """
    friday = now + timedelta(days=(4 - now.weekday()) % 7 - 7)
    edit_at = await frozen_clock.set(friday.replace(hour=2, minute=10))
    one = await make.given(
        conn, make.schedule(next_fire_at=friday.replace(hour=21), recurrence=Cron("0 21 * * 2,5", "UTC"))
    )
    edited = await change(conn, one, recurrence=Cron("0 23 * * 3,0", "UTC"))
    sunday = (edit_at + timedelta(days=2)).replace(hour=23, minute=0)
    assert edited.next_fire_at == sunday
    await plan(planner)
    assert await make.runs_of(conn, one) == []


async def test_a_rule_with_an_earlier_instant_moves_the_pointer_back(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now + 3 * SECOND, every=3600))
    await plan(planner)
    edited = await change(conn, one, recurrence=make.every(1, now))
    assert edited.next_fire_at == now + SECOND
    await plan(planner)
    assert await make.instants_of(conn, one) == [now + n * SECOND for n in range(1, 6)]


async def test_planned_runs_that_the_new_rule_does_not_make_are_superseded(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + SECOND, recurrence=make.every(1, now)))
    await plan(planner)
    await change(conn, one, recurrence=make.every(2, now))
    gone = ("cancelled", "superseded")
    kept = ("pending", None)
    assert await statuses(conn, one) == [
        (now + n * SECOND, *(kept if n % 2 == 0 else gone)) for n in range(1, 6)
    ]
    versions = {row["scheduled_for"]: row["schedule_version"] for row in await make.runs_of(conn, one)}
    assert [versions[now + n * SECOND] for n in range(1, 6)] == [1, 2, 1, 2, 1]


async def test_edit_and_edit_back_inside_the_look_ahead_loses_no_occurrence(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    rule = make.every(2, now)
    one = await make.given(conn, make.schedule(next_fire_at=now + 2 * SECOND, recurrence=rule))
    await plan(planner)
    await change(conn, one, recurrence=Cron("0 0 1 1 *", "UTC"))
    assert {status for _, status, _ in await statuses(conn, one)} == {"cancelled"}
    await change(conn, one, recurrence=rule)
    await plan(planner)
    rows = await make.runs_of(conn, one)
    assert [row["scheduled_for"] for row in rows] == [now + 2 * SECOND, now + 4 * SECOND]
    for row in rows:
        assert (row["status"], row["reason"], row["finished_at"], row["schedule_version"]) == (
            "pending",
            None,
            None,
            3,
        )


async def test_runs_cancelled_by_a_person_do_not_come_back_with_the_rule(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now + 2 * SECOND, every=60))
    await plan(planner)
    [run] = await make.runs_of(conn, one)
    await edits.cancel_run(conn, one.tenant_id, run["id"])
    await change(conn, one, recurrence=make.every(30, now + 2 * SECOND))
    assert await statuses(conn, one) == [(now + 2 * SECOND, "cancelled", "cancelled")]


async def test_a_superseded_run_comes_back_with_its_rule_only_and_not_with_another_edit(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now + 2 * SECOND, every=60))
    await plan(planner)
    await change(conn, one, recurrence=Cron("0 0 1 1 *", "UTC"))
    await change(conn, one, name="other")
    assert await statuses(conn, one) == [(now + 2 * SECOND, "cancelled", "superseded")]


async def test_what_the_old_rule_owed_for_a_month_that_is_gone_is_recorded_and_does_not_forbid_the_edit(
    conn: Connection, now: datetime
) -> None:
    [span] = await partitions.attached_range(conn)
    at = span.start - HOUR
    one = await make.given(
        conn, make.schedule(next_fire_at=at, recurrence=Once(at), expires_after=timedelta(days=30))
    )
    await change(conn, one, recurrence=make.every(3600, now))
    assert await make.dispositions_of(conn, one) == [(at, at, 1, "too_old")]
    assert await make.runs_of(conn, one) == []


@pytest.mark.parametrize("state", ["leased", "attempted", "released", "overdue", "manual"])
async def test_a_changed_rule_leaves_alone_what_has_begun_or_is_due_or_a_persons_own(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime, state: str
) -> None:
    one = await make.given(conn, starting(now + 2 * SECOND, every=60))
    await plan(planner)
    [run] = await make.runs_of(conn, one)
    match state:
        case "leased":
            await make.lease(conn, run["id"])
        case "attempted":
            await conn.execute("UPDATE job_run SET status = 'retrying', attempt = 1")
        case "released":
            await conn.execute("UPDATE job_run SET attempt = 1")
        case "overdue":
            await frozen_clock.tick(2 * SECOND)
        case _:
            await conn.execute("DELETE FROM job_run")
            await edits.run_now(conn, one.tenant_id, one.id)
            await frozen_clock.tick(-SECOND)  # so that it lies ahead
    before = await make.runs_of(conn, one)
    await change(conn, one, recurrence=Cron("0 0 1 1 *", "UTC"))
    assert await make.runs_of(conn, one) == before


async def test_what_the_old_rule_owed_is_planned_before_it_goes(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    """The planner was some seconds behind: those occurrences were due before the edit, and late is not
    lost.
    """
    one = await make.given(conn, make.schedule(next_fire_at=now - 4 * SECOND, recurrence=make.every(2)))
    edited = await change(conn, one, recurrence=make.every(3600, now))
    assert await make.instants_of(conn, one) == [now - 4 * SECOND, now - 2 * SECOND, now]
    assert (edited.last_fire_at, edited.next_fire_at) == (now, now + HOUR)
    assert {row["schedule_version"] for row in await make.runs_of(conn, one)} == {1}


async def test_what_the_old_rule_owed_for_hours_follows_its_misfire_policy(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(
        conn,
        make.schedule(
            next_fire_at=now - 5 * HOUR, recurrence=Cron("30 * * * *", "UTC"), misfire=Misfire.FIRE_ONCE
        ),
    )
    await make.alter(conn, one, {"next_fire_at": now - 4.5 * HOUR})
    await change(conn, one, recurrence=make.every(3600, now))
    assert await make.instants_of(conn, one) == [now - 0.5 * HOUR]
    assert await make.dispositions_of(conn, one) == [(now - 4.5 * HOUR, now - 1.5 * HOUR, 4, "misfire")]


async def test_a_rule_that_raises_can_still_be_replaced_and_its_debt_is_recorded(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(
        conn, make.schedule(next_fire_at=now - HOUR, recurrence=Cron("0 * * * *", "Mars/Olympus"))
    )
    edited = await change(conn, one, recurrence=make.every(60, now))
    assert edited.next_fire_at == now + 60 * SECOND
    [(first, last, count, reason)] = await make.dispositions_of(conn, one)
    assert (first, last, count, reason) == (now - HOUR, now, 1, "superseded")


@pytest.mark.parametrize("status", [ScheduleStatus.FINISHED, ScheduleStatus.ERROR])
async def test_a_new_rule_takes_a_finished_or_quarantined_schedule_back_into_work(
    conn: Connection, now: datetime, status: ScheduleStatus
) -> None:
    pointer = None if status is ScheduleStatus.FINISHED else now - HOUR
    one = await make.given(conn, make.schedule(next_fire_at=pointer, status=status))
    await make.alter(conn, one, {"status_reason": "why"})
    edited = await change(conn, one, recurrence=Once(now + HOUR))
    assert (edited.status, edited.status_reason, edited.next_fire_at) == (
        ScheduleStatus.ACTIVE,
        None,
        now + HOUR,
    )


async def test_another_edit_leaves_a_quarantined_schedule_where_it_is(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now - HOUR, status=ScheduleStatus.ERROR))
    edited = await change(conn, one, name="other")
    assert (edited.status, edited.next_fire_at) == (ScheduleStatus.ERROR, now - HOUR)


async def test_a_new_rule_on_a_paused_schedule_waits_for_the_resume(
    conn: Connection, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    await edits.pause(conn, one.tenant_id, one.id, reason="holiday")
    later = await frozen_clock.tick(2 * HOUR)
    edited = await change(conn, one, recurrence=make.every(60, later))
    assert (edited.status, edited.status_reason) == (ScheduleStatus.PAUSED, "holiday")
    assert await make.dispositions_of(conn, one) == [(now + HOUR, now + 2 * HOUR, 2, "paused")]
    await frozen_clock.tick(90 * SECOND)
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert resumed.next_fire_at == later + 120 * SECOND
    assert (await make.dispositions_of(conn, one))[1:] == [
        (later + 60 * SECOND, later + 60 * SECOND, 1, "paused")
    ]


# Pause and resume


async def test_pause_and_resume_inside_the_look_ahead_lose_no_occurrence(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now + 2 * SECOND, every=3600))
    await plan(planner)
    await edits.pause(conn, one.tenant_id, one.id)
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert resumed.next_fire_at == now + 2 * SECOND
    await plan(planner)
    assert await statuses(conn, one) == [(now + 2 * SECOND, "pending", None)]
    row = await make.plain(conn, one)
    assert (row["next_fire_at"], row["status"]) == (now + 2 * SECOND + HOUR, "active")
    assert await make.dispositions_of(conn, one) == []


async def test_a_pause_before_the_planner_came_loses_nothing_either(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, starting(now - 3 * SECOND, every=3600))
    await edits.pause(conn, one.tenant_id, one.id)
    await frozen_clock.tick(SECOND)
    await edits.resume(conn, one.tenant_id, one.id)
    assert await statuses(conn, one) == [(now - 3 * SECOND, "pending", None)]
    assert await make.dispositions_of(conn, one) == []


async def test_a_paused_schedule_is_not_planned(conn: Connection, planner: Pool, now: datetime) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + SECOND))
    paused = await edits.pause(conn, one.tenant_id, one.id, reason="stop it")
    assert (paused.status, paused.status_reason, paused.version) == (ScheduleStatus.PAUSED, "stop it", 2)
    await plan(planner)
    assert await make.runs_of(conn, one) == []


async def test_pausing_twice_and_resuming_twice_change_nothing_the_second_time(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    paused = await edits.pause(conn, one.tenant_id, one.id, reason="first")
    assert await edits.pause(conn, one.tenant_id, one.id, reason="second") == paused
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert await edits.resume(conn, one.tenant_id, one.id) == resumed
    assert resumed.version == 3


@pytest.mark.parametrize("misfire", list(Misfire))
async def test_a_resume_after_thirty_misses_records_them_and_starts_from_now(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime, misfire: Misfire
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR, misfire=misfire))
    await edits.pause(conn, one.tenant_id, one.id)
    later = await frozen_clock.tick(30 * HOUR + timedelta(minutes=30))
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert resumed.next_fire_at == later + timedelta(minutes=30)
    assert await make.dispositions_of(conn, one) == [(now + HOUR, now + 30 * HOUR, 30, "paused")]
    await plan(planner)
    assert await make.runs_of(conn, one) == []


async def test_a_one_off_that_passed_during_the_pause_is_finished_and_recorded(
    conn: Connection, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR, recurrence=Once(now + HOUR)))
    await edits.pause(conn, one.tenant_id, one.id)
    await frozen_clock.tick(2 * HOUR)
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert (resumed.status, resumed.next_fire_at) == (ScheduleStatus.FINISHED, None)
    assert await make.dispositions_of(conn, one) == [(now + HOUR, now + HOUR, 1, "paused")]


async def test_a_one_off_that_was_due_when_paused_is_finished_at_the_resume(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now - SECOND, recurrence=Once(now - SECOND)))
    paused = await edits.pause(conn, one.tenant_id, one.id)
    assert (paused.status, paused.next_fire_at) == (ScheduleStatus.PAUSED, None)
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert resumed.status is ScheduleStatus.FINISHED
    assert await statuses(conn, one) == [(now - SECOND, "pending", None)]


async def test_a_year_of_paused_minutes_is_one_stretch_with_a_bounded_count(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(
        conn,
        make.schedule(
            next_fire_at=now - timedelta(days=365),
            recurrence=Cron("* * * * *", "UTC"),
            status=ScheduleStatus.PAUSED,
        ),
    )
    await edits.resume(conn, one.tenant_id, one.id)
    assert await make.dispositions_of(conn, one) == [(now - timedelta(days=365), now, 10_000, "paused")]


async def test_finished_schedules_are_neither_paused_nor_resumed(conn: Connection, now: datetime) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=None, status=ScheduleStatus.FINISHED))
    with pytest.raises(Conflict, match="finished"):
        await edits.pause(conn, one.tenant_id, one.id)
    with pytest.raises(Conflict, match="finished"):
        await edits.resume(conn, one.tenant_id, one.id)


async def test_a_quarantined_schedule_is_resumed_when_it_can_be_planned_again(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now - HOUR, status=ScheduleStatus.ERROR))
    resumed = await edits.resume(conn, one.tenant_id, one.id)
    assert (resumed.status, resumed.next_fire_at) == (ScheduleStatus.ACTIVE, now + HOUR)
    assert await make.dispositions_of(conn, one) == [(now - HOUR, now, 2, "quarantined")]


async def test_a_quarantined_schedule_that_still_cannot_be_planned_stays_so(
    conn: Connection, now: datetime
) -> None:
    one = await make.given(
        conn,
        make.schedule(
            next_fire_at=now - HOUR, recurrence=Cron("0 * * * *", "Mars/Olympus"), status=ScheduleStatus.ERROR
        ),
    )
    with pytest.raises(Conflict, match="cannot be computed"):
        await edits.resume(conn, one.tenant_id, one.id)
    assert (await make.plain(conn, one))["status"] == "error"


@pytest.mark.parametrize("reason", ["x" * 501, "a\0b", "\ud800"])
async def test_a_reason_that_cannot_be_stored_is_refused_by_its_field(
    conn: Connection, now: datetime, reason: str
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    with pytest.raises(InvalidInput, match="reason"):
        await edits.pause(conn, one.tenant_id, one.id, reason=reason)


# Delete


async def test_delete_ends_free_runs_at_once_and_asks_the_holders_of_others(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now, recurrence=make.every(1, now)))
    await plan(planner)
    runs = await make.runs_of(conn, one)
    at = await frozen_clock.tick(2 * SECOND)
    await make.lease(conn, runs[0]["id"])
    await conn.execute(
        "UPDATE job_run SET status = 'retrying', attempt = 1, fire_after = $2 WHERE id = $1",
        runs[1]["id"],
        now + HOUR,
    )
    await conn.execute(
        "UPDATE job_run SET status = 'succeeded', finished_at = now() WHERE id = $1", runs[2]["id"]
    )
    await edits.delete(conn, one.tenant_id, one.id)
    leased, retrying, done, *future = await make.runs_of(conn, one)
    assert (leased["status"], leased["cancel_requested_at"], leased["claimed_by"]) == (
        "pending",
        at,
        "other/1/1",
    )
    assert leased["finished_at"] is None
    assert (done["status"], done["reason"]) == ("succeeded", None)
    assert len(future) == 3
    for free in (retrying, *future):
        assert (free["status"], free["reason"], free["finished_at"]) == ("cancelled", "schedule_deleted", at)
    row = await make.plain(conn, one)
    assert (row["status"], row["next_fire_at"], row["version"]) == ("deleted", None, 2)


async def test_a_deleted_schedule_is_not_planned_and_what_it_owed_is_recorded(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now - HOUR))
    await edits.delete(conn, one.tenant_id, one.id)
    await plan(planner)
    assert await make.runs_of(conn, one) == []
    assert await make.dispositions_of(conn, one) == [(now - HOUR, now, 2, "schedule_deleted")]


async def test_a_lapsed_lease_is_left_to_the_next_claim(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    """Its attempt needs its evidence, which only a claim writes."""
    one = await make.given(conn, starting(now, every=3600))
    await plan(planner)
    [run] = await make.runs_of(conn, one)
    await make.lease(conn, run["id"])
    await conn.execute("UPDATE job_run SET claim_expires_at = now() - interval '1 hour'")
    await edits.delete(conn, one.tenant_id, one.id)
    [row] = await make.runs_of(conn, one)
    assert (row["status"], row["claimed_by"], row["cancel_requested_at"]) == ("pending", "other/1/1", now)


async def test_deleting_and_making_again_leaves_two_histories(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now, every=3600))
    await plan(planner)
    await edits.delete(conn, one.tenant_id, one.id)
    again = await make.given(
        conn,
        replace(
            make.schedule(next_fire_at=now, recurrence=make.every(3600, now), tenant_id=one.tenant_id),
            name=one.name,
        ),
    )
    await plan(planner)
    assert await statuses(conn, one) == [(now, "cancelled", "schedule_deleted")]
    assert await statuses(conn, again) == [(now, "pending", None)]


# Manual runs and cancelling


async def test_a_manual_run_is_due_now_and_can_never_share_a_key_with_an_occurrence(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now, every=3600))
    ref = await edits.run_now(conn, one.tenant_id, one.id)
    await plan(planner)
    occurrence, manual = await make.runs_of(conn, one)
    assert (occurrence["origin"], occurrence["scheduled_for"]) == ("schedule", now)
    assert (manual["origin"], manual["status"], manual["attempt"]) == ("manual", "pending", 0)
    assert (manual["id"], manual["scheduled_for"]) == (ref.id, now + timedelta(microseconds=1))
    assert manual["idempotency_key"] == ref.id == run_id(one.id, ref.scheduled_for)
    assert manual["expires_at"] == ref.scheduled_for + one.expires_after
    assert (ref.tenant_id, ref.fire_after) == (one.tenant_id, manual["fire_after"])
    assert (await make.plain(conn, one))["last_fire_at"] == now


async def test_many_manual_runs_of_one_moment_all_exist(
    conn: Connection, frozen_clock: FrozenClock, now: datetime
) -> None:
    await frozen_clock.set(now + timedelta(microseconds=998))
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))

    async def ask() -> UUID:
        async with acquire(frozen_clock.pool) as own:
            return (await edits.run_now(own, one.tenant_id, one.id)).id

    ids = await asyncio.gather(*(ask() for _ in range(5)))
    instants = await make.instants_of(conn, one)
    assert len(set(ids)) == len(instants) == 5
    assert [(at - now) // timedelta(microseconds=1) for at in instants] == [998, 999, 1001, 1002, 1003]


@pytest.mark.parametrize("status", [ScheduleStatus.PAUSED, ScheduleStatus.FINISHED])
async def test_a_person_may_run_a_paused_or_finished_schedule(
    conn: Connection, now: datetime, status: ScheduleStatus
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=None, status=status))
    ref = await edits.run_now(conn, one.tenant_id, one.id)
    assert [row["id"] for row in await make.runs_of(conn, one)] == [ref.id]


async def test_a_quarantined_schedule_is_not_run(conn: Connection, now: datetime) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now, status=ScheduleStatus.ERROR))
    with pytest.raises(Conflict, match="set aside"):
        await edits.run_now(conn, one.tenant_id, one.id)


async def test_a_free_run_is_cancelled_at_once(conn: Connection, planner: Pool, now: datetime) -> None:
    one = await make.given(conn, starting(now, every=3600))
    await plan(planner)
    [run] = await make.runs_of(conn, one)
    assert await edits.cancel_run(conn, one.tenant_id, run["id"]) is RunCancel.CANCELLED
    [row] = await make.runs_of(conn, one)
    assert (row["status"], row["reason"], row["finished_at"]) == ("cancelled", "cancelled", now)
    assert await edits.cancel_run(conn, one.tenant_id, run["id"]) is RunCancel.CANCELLED
    assert await make.runs_of(conn, one) == [row]


async def test_the_holder_of_a_leased_run_is_asked_and_keeps_its_lease(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, starting(now, every=3600))
    await plan(planner)
    [run] = await make.runs_of(conn, one)
    await make.lease(conn, run["id"])
    assert await edits.cancel_run(conn, one.tenant_id, run["id"]) is RunCancel.REQUESTED
    await frozen_clock.tick(SECOND)
    assert await edits.cancel_run(conn, one.tenant_id, run["id"]) is RunCancel.REQUESTED
    [row] = await make.runs_of(conn, one)
    assert (row["status"], row["claimed_by"], row["cancel_requested_at"]) == ("pending", "other/1/1", now)


@pytest.mark.parametrize("status", ["succeeded", "failed"])
async def test_a_run_that_has_ended_stays_as_it_is(
    conn: Connection, planner: Pool, now: datetime, status: str
) -> None:
    one = await make.given(conn, starting(now, every=3600))
    await plan(planner)
    await conn.execute("UPDATE job_run SET status = $1, finished_at = now()", status)
    [run] = await make.runs_of(conn, one)
    with pytest.raises(Conflict, match=status):
        await edits.cancel_run(conn, one.tenant_id, run["id"])
    assert await make.runs_of(conn, one) == [run]


async def test_runs_of_others_unknown_runs_and_ids_of_no_run_are_not_found(
    conn: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(conn, starting(now, every=3600))
    await plan(planner)
    [run] = await make.runs_of(conn, one)
    for tenant, id_ in (
        (make.tenant(), run["id"]),
        (one.tenant_id, run_id(ScheduleId(uuid4()), now)),
        (one.tenant_id, uuid4()),
        (one.tenant_id, UUID(int=0)),
        (one.tenant_id, UUID(int=2**128 - 1)),
    ):
        with pytest.raises(NotFound):
            await edits.cancel_run(conn, tenant, id_)
    assert await make.runs_of(conn, one) == [run]


# Against the planner


async def test_a_planner_at_work_is_waited_for_and_then_seen(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    """The edit's transaction begins while the planner holds the row; what that one planned follows the
    edit.
    """
    one = await make.given(conn, starting(now + 3 * SECOND, every=3600))

    async def edit() -> Schedule:
        async with acquire(frozen_clock.pool) as own:
            return await change(own, one, recurrence=make.every(2, now))

    async with transaction(planner) as holder:
        await holder.execute("SELECT 1 FROM schedule WHERE id = $1 FOR UPDATE", one.id)
        task = asyncio.create_task(edit())
        await make.someone_waits(conn)
        await make.plan_by_hand(holder, one, now + 3 * SECOND, following=now + 3 * SECOND + HOUR)
    edited = await task
    assert edited.next_fire_at == now + 2 * SECOND
    assert await statuses(conn, one) == [(now + 3 * SECOND, "cancelled", "superseded")]


async def test_an_edit_at_work_is_not_planned_over(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, starting(now + 3 * SECOND, every=3600))
    async with transaction(frozen_clock.pool) as editor:
        await change(editor, one, recurrence=make.every(2, now))
        await plan(planner)  # does not wait, plans nothing of it
    assert await make.runs_of(conn, one) == []
    await plan(planner)
    assert await make.instants_of(conn, one) == [now + 2 * SECOND, now + 4 * SECOND]


async def impatient_edit(pool: Pool, one: Schedule) -> None:
    async with transaction(pool) as own:
        await own.execute("SET LOCAL lock_timeout = '20ms'")
        await change(own, one, name="x")


async def test_a_row_that_stays_locked_ends_the_edit_in_bounded_time(
    conn: Connection, pool: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(conn, make.schedule(next_fire_at=now + HOUR))
    async with transaction(pool) as holder:
        await holder.execute("SELECT 1 FROM schedule WHERE id = $1 FOR UPDATE", one.id)
        with pytest.raises(StoreUnavailable):
            await impatient_edit(frozen_clock.pool, one)


RULES: list[Recurrence] = [
    Every(timedelta(seconds=1), datetime(2026, 1, 1, tzinfo=UTC)),
    Every(timedelta(seconds=3), datetime(2026, 1, 1, tzinfo=UTC)),
    Cron("* * * * *", "UTC"),
]


@pytest.mark.parametrize("seed", range(4))
async def test_random_edits_between_turns_leave_every_occurrence_with_exactly_one_fate(
    conn: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime, seed: int
) -> None:
    """A model beside it: the rule and state in force at each instant decide what must exist for it, and what
    must not.
    """
    rng = random.Random(seed)
    rule = rng.choice(RULES)
    first = make.first_after(rule, now)
    one = await make.given(conn, make.schedule(next_fire_at=first, recurrence=rule, misfire=Misfire.FIRE_ALL))
    is_paused = False
    owed: dict[
        datetime, bool
    ] = {}  # instant -> whether it must have an open run (else a run or a disposition)
    at = now
    for _ in range(60):
        match rng.randrange(5):
            case 0 | 1:
                await plan(planner)
            case 2:
                rule = rng.choice(RULES)
                await change(conn, one, recurrence=rule)
            case 3:
                await edits.pause(conn, one.tenant_id, one.id)
                is_paused = True
            case _:
                await edits.resume(conn, one.tenant_id, one.id)
                is_paused = False
        before, at = at, await frozen_clock.tick(timedelta(milliseconds=rng.randrange(1, 2_500)))
        owed |= {instant: not is_paused for instant in make.instants_between(rule, before, at)}
    await edits.resume(conn, one.tenant_id, one.id)
    await plan(planner)
    runs = {row["scheduled_for"]: row for row in await make.runs_of(conn, one)}
    stretches = await make.dispositions_of(conn, one)
    for instant, must_fire in owed.items():
        covered = [stretch for stretch in stretches if stretch[0] <= instant <= stretch[1]]
        if must_fire:
            assert runs[instant]["status"] == "pending", instant
        assert instant in runs or covered, instant
    for instant, row in runs.items():
        if instant <= at and instant not in owed:
            assert (row["status"], row["reason"]) == ("cancelled", "superseded")
