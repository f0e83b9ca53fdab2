"""Whole turns of the planner on a real database, mostly on a clock that stands still."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from app import metrics
from app.domain.ids import run_id
from app.domain.recurrence import Cron, Once
from app.domain.run import RunRef
from app.domain.schedule import Misfire, Schedule
from app.errors import PartitionMissing, StoreUnavailable
from app.planner import tick
from app.planner.tick import Planned, Planner, plan_due
from app.settings import PlannerSettings
from app.store import partitions, planning
from app.store.partitions import Month, Span
from app.store.pool import Connection, Pool, acquire, close_pool, transaction
from tests import factories_schedules as make
from tests.frozen import FrozenClock

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture
async def now(frozen_clock: FrozenClock) -> datetime:
    return await make.mid_month(frozen_clock)


@pytest.fixture
async def planner(dsn: str, frozen_clock: FrozenClock, now: datetime) -> AsyncIterator[Pool]:
    async with make.planner_pool(dsn, clock=frozen_clock) as pool:
        yield pool


class Heard:
    """An announce that remembers."""

    def __init__(self) -> None:
        self.runs: list[RunRef] = []

    async def __call__(self, runs: Sequence[RunRef]) -> None:
        self.runs += runs


async def plan(pool: Pool, heard: Heard | None = None, **settings: Any) -> Planned:
    return await plan_due(pool, heard or Heard(), PlannerSettings(**settings))


def counted(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(f"scheduler_{name}_total", labels) or 0.0


async def given(db: Connection, first: datetime, count: int = 1) -> list[Schedule]:
    """Hourly schedules whose first occurrence is `first`."""
    rule = make.every(3600, first)
    return [await make.given(db, make.schedule(next_fire_at=first, recurrence=rule)) for _ in range(count)]


async def planned_ids(db: Connection) -> set[Any]:
    return {row[0] for row in await db.fetch("SELECT schedule_id FROM job_run")}


async def refuse_runs_of(db: Connection, bad: Sequence[Schedule]) -> None:
    """The database refuses these schedules' runs, as it would for data that no check of ours foresaw."""
    ids = ", ".join(f"'{one.id}'" for one in bad)
    await db.execute(f"ALTER TABLE job_run ADD CONSTRAINT refused CHECK (schedule_id NOT IN ({ids}))")


async def test_a_turn_makes_runs_and_moves_pointers(db: Connection, planner: Pool, now: datetime) -> None:
    [one] = await given(db, now + 5 * SECOND)
    [far] = await given(db, now + 5 * SECOND + timedelta(milliseconds=1))
    heard = Heard()
    planned = await plan(planner, heard)
    assert await make.instants_of(db, one) == [now + 5 * SECOND]
    row = await make.plain(db, one)
    assert (row["next_fire_at"], row["last_fire_at"]) == (now + 5 * SECOND + HOUR, now + 5 * SECOND)
    assert await make.runs_of(db, far) == []
    assert [ref.id for ref in heard.runs] == [run_id(one.id, now + 5 * SECOND)]
    assert (planned.runs, planned.schedules, planned.replans, planned.has_more) == (1, 1, 0, False)
    assert planned.database_now == now


async def test_a_second_turn_finds_nothing_left_to_do(db: Connection, planner: Pool, now: datetime) -> None:
    await given(db, now, 3)
    await plan(planner)
    heard = Heard()
    assert (await plan(planner, heard)).batches == 0
    assert heard.runs == []


async def test_runs_are_announced_after_they_are_committed(
    db: Connection, planner: Pool, now: datetime
) -> None:
    await given(db, now, 3)
    seen: list[int] = []

    async def look(runs: Sequence[RunRef]) -> None:
        seen.append(
            await db.fetchval("SELECT count(*) FROM job_run WHERE id = ANY($1)", [run.id for run in runs])
        )

    await plan_due(planner, look, PlannerSettings())
    assert seen == [3]


async def test_a_turn_goes_on_until_nothing_is_due_whatever_the_batch(
    db: Connection, planner: Pool, now: datetime
) -> None:
    made = await given(db, now, 10)
    planned = await plan(planner, batch=3)
    assert await planned_ids(db) == {one.id for one in made}
    assert (planned.schedules, planned.batches, planned.has_more) == (10, 4, False)


async def test_the_present_is_planned_before_the_backlog(
    db: Connection, planner: Pool, now: datetime
) -> None:
    backlog = await given(db, now - HOUR, 6)
    present = await given(db, now, 6)
    heard = Heard()
    await plan(planner, heard, batch=2)
    order = [ref.id for ref in heard.runs]
    last_present = max(order.index(run_id(one.id, now)) for one in present)
    first_backlog = min(order.index(run_id(one.id, now - HOUR)) for one in backlog)
    assert last_present < first_backlog


async def test_an_overlong_present_does_not_starve_the_backlog(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick, "ON_TIME_BATCHES", 1)
    monkeypatch.setattr(tick, "OVERDUE_BATCHES", 1)
    await given(db, now, 9)
    [late] = await given(db, now - HOUR)
    planned = await plan(planner, batch=2)
    assert planned.has_more
    assert late.id in await planned_ids(db)


async def test_the_loop_comes_again_at_once_while_there_is_more(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick, "ON_TIME_BATCHES", 1)
    made = await given(db, now, 5)
    body = Planner(planner, Heard(), PlannerSettings(batch=2))
    pauses = [await body.plan_due() for _ in range(3)]
    assert pauses == [timedelta(), timedelta(), None]
    assert await planned_ids(db) == {one.id for one in made}


async def test_runs_per_batch_are_bounded_and_the_rest_follows_in_the_same_turn(
    db: Connection, planner: Pool, now: datetime
) -> None:
    for _ in range(6):
        await make.given(db, make.schedule(next_fire_at=now, recurrence=make.every(1, now)))  # six runs each
    planned = await plan(planner, rows_per_batch=12, batch=12)
    assert (planned.runs, planned.batches, planned.has_more) == (36, 3, False)


# Poison


async def test_one_broken_schedule_at_the_head_does_not_hold_up_499_others(
    db: Connection, planner: Pool, now: datetime
) -> None:
    """quartz#48."""
    broken = await make.given(
        db, make.schedule(next_fire_at=now - 2 * SECOND, recurrence=Cron("0 * * * *", "Mars/Olympus"))
    )
    await make.given_many(db, make.schedule(next_fire_at=now, recurrence=make.every(3600, now)), 499)
    planned = await plan(planner)
    assert (planned.runs, planned.quarantined) == (499, 1)
    row = await make.plain(db, broken)
    assert (row["status"], row["version"], row["next_fire_at"]) == ("error", 2, now - 2 * SECOND)
    assert "Mars/Olympus" in row["status_reason"]
    assert (await plan(planner)).batches == 0


async def test_what_the_database_refuses_is_isolated_and_set_aside_alone(
    db: Connection, planner: Pool, now: datetime
) -> None:
    made = await given(db, now, 64)
    bad = [made[0], made[31], made[63]]
    await refuse_runs_of(db, bad)
    refused = counted("planner_batch_refused")
    heard = Heard()
    planned = await plan(planner, heard)
    assert (planned.runs, planned.quarantined, planned.postponed) == (61, 3, 0)
    assert await planned_ids(db) == {one.id for one in made} - {one.id for one in bad}
    assert {ref.id for ref in heard.runs} == {run_id(one.id, now) for one in made if one not in bad}
    for one in bad:
        row = await make.plain(db, one)
        assert row["status"] == "error"
        assert "the database refuses" in row["status_reason"]
    assert counted("planner_batch_refused") == refused + 1
    assert (await plan(planner)).batches == 0


async def test_a_batch_of_one_that_is_refused_is_set_aside(
    db: Connection, planner: Pool, now: datetime
) -> None:
    [one] = await given(db, now)
    await refuse_runs_of(db, [one])
    assert (await plan(planner)).quarantined == 1
    assert (await make.plain(db, one))["status"] == "error"


async def test_what_was_edited_while_a_refused_batch_is_repeated_is_left_to_a_later_turn(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, edited, good = await given(db, now, 3)
    await refuse_runs_of(db, [bad])
    real = planning.lock_again

    async def paused_before(conn: Connection, rows: Any) -> Any:
        await db.execute("UPDATE schedule SET status = 'paused' WHERE id = $1", edited.id)
        return await real(conn, rows)

    monkeypatch.setattr(planning, "lock_again", paused_before)
    planned = await plan(planner)
    assert (planned.runs, planned.quarantined) == (1, 1)
    assert await planned_ids(db) == {good.id}
    assert (await make.plain(db, edited))["status"] == "paused"


async def test_a_refused_schedule_that_was_edited_meanwhile_is_not_set_aside(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    [one] = await given(db, now)
    await refuse_runs_of(db, [one])
    real = planning.quarantine

    async def edited_before(conn: Connection, *args: Any) -> Any:
        await db.execute("UPDATE schedule SET version = 2")
        return await real(conn, *args)

    monkeypatch.setattr(planning, "quarantine", edited_before)
    assert (await plan(planner)).quarantined == 0
    assert (await make.plain(db, one))["status"] == "active"


async def test_a_schedule_that_the_guarded_advance_does_not_return_is_set_aside(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await given(db, now, 2)
    real = planning.advance

    async def leaves_one_out(conn: Connection, advances: Sequence[planning.Advance]) -> Any:
        return await real(conn, [each for each in advances if each.id != one.id])

    monkeypatch.setattr(planning, "advance", leaves_one_out)
    assert (await plan(planner)).quarantined == 1
    assert (await make.plain(db, one))["status"] == "error"
    assert (await make.plain(db, other))["next_fire_at"] == now + HOUR
    monkeypatch.undo()
    assert (await plan(planner)).batches == 0


async def test_a_reason_with_a_nul_or_a_surrogate_can_be_stored(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    [one] = await given(db, now)

    def fails(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("bad \0 and \ud800")

    monkeypatch.setattr("app.planner.draft.plan", fails)
    assert (await plan(planner)).quarantined == 1
    assert (await make.plain(db, one))["status_reason"] == "RuntimeError: bad � and ?"


# Months


async def test_a_month_that_lacks_is_asked_for_and_only_its_occurrences_wait(
    db: Connection, planner: Pool, frozen_clock: FrozenClock
) -> None:
    [span] = await partitions.attached_range(db)
    await frozen_clock.set(span.end - 2 * SECOND)
    [before] = await given(db, span.end - SECOND)
    [behind] = await given(db, span.end + SECOND)
    both = await make.given(db, make.schedule(next_fire_at=span.end - SECOND, recurrence=make.every(1)))
    planned = await plan(planner)
    assert planned.quarantined == 0
    assert await make.instants_of(db, before) == [span.end - SECOND]
    assert await make.instants_of(db, both) == [span.end - SECOND]
    assert (await make.plain(db, both))["next_fire_at"] == span.end
    assert (await make.plain(db, behind))["status"] == "active"
    assert await partitions.requested(db) == [Month.of(span.end)]
    await partitions.ensure_month(db, Month.of(span.end))
    await plan(planner)
    assert await make.instants_of(db, behind) == [span.end + SECOND]
    assert await make.instants_of(db, both) == [span.end + n * SECOND for n in range(-1, 4)]


async def test_without_the_current_month_the_turn_fails_aloud_and_asks_for_it(
    db: Connection, planner: Pool, frozen_clock: FrozenClock
) -> None:
    [span] = await partitions.attached_range(db)
    await frozen_clock.set(span.end + HOUR)
    [one] = await given(db, span.end + HOUR)
    with pytest.raises(PartitionMissing, match=str(Month.of(span.end))):
        await plan(planner)
    assert await partitions.requested(db) == [Month.of(span.end)]
    assert (await make.plain(db, one))["status"] == "active"


async def test_a_month_that_goes_during_the_turn_costs_only_its_own_schedules(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    [span] = await partitions.attached_range(db)
    await frozen_clock.set(span.end - 2 * SECOND)
    good = await given(db, span.end - SECOND, 20)
    [waits] = await given(db, span.end + SECOND)

    async def too_much(_conn: Connection) -> list[Span]:
        return [Span(span.start, span.end + timedelta(days=30))]

    monkeypatch.setattr(partitions, "attached_range", too_much)
    planned = await plan(planner)
    assert (planned.runs, planned.quarantined, planned.postponed) == (20, 0, 1)
    assert await planned_ids(db) == {one.id for one in good}
    assert (await make.plain(db, waits))["status"] == "active"
    assert await partitions.requested(db) == [Month.of(span.end)]


async def test_schedules_that_cannot_move_do_not_stand_at_the_head(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three full batches wait for a month that has just been taken out; what is due behind them is planned."""
    [span] = await partitions.attached_range(db)
    now = await frozen_clock.set(span.start + 24 * HOUR)
    gone = span.start - HOUR
    waiting = [
        await make.given(db, make.schedule(next_fire_at=gone, recurrence=Once(gone))) for _ in range(6)
    ]
    await db.execute("UPDATE schedule SET expires_after = '30 days'")
    good = await given(db, now - HOUR, 2)

    async def as_it_was(_conn: Connection) -> list[Span]:
        return [Span(span.start - timedelta(days=28), span.end)]

    monkeypatch.setattr(partitions, "attached_range", as_it_was)
    planned = await plan(planner, batch=2)
    assert (planned.postponed, planned.quarantined) == (6, 0)
    assert await planned_ids(db) == {one.id for one in good}
    assert await partitions.requested(db) == []  # what retention took out is not asked for again
    monkeypatch.undo()
    assert (await plan(planner)).skipped == {"too_old": 6}
    for one in waiting:
        assert (await make.plain(db, one))["status"] == "finished"


async def test_what_is_older_than_the_attached_months_is_recorded_and_never_planned(
    db: Connection, planner: Pool, now: datetime
) -> None:
    [span] = await partitions.attached_range(db)
    at = span.start - HOUR
    one = await make.given(
        db, make.schedule(next_fire_at=at, recurrence=Once(at), expires_after=timedelta(days=30))
    )
    planned = await plan(planner)
    assert planned.skipped == {"too_old": 1}
    assert await make.runs_of(db, one) == []
    assert await make.dispositions_of(db, one) == [(at, at, 1, "too_old")]
    assert (await make.plain(db, one))["status"] == "finished"


async def test_occurrences_on_both_sides_of_a_month_end_share_a_batch(
    db: Connection, planner: Pool, frozen_clock: FrozenClock
) -> None:
    [span] = await partitions.attached_range(db)
    month_end = Month.of(span.start).plus(1).end
    await frozen_clock.set(month_end - 3 * SECOND)
    one = await make.given(db, make.schedule(next_fire_at=month_end - 2 * SECOND, recurrence=make.every(1)))
    assert (await plan(planner)).batches == 1
    assert await make.instants_of(db, one) == [month_end + n * SECOND for n in range(-2, 3)]


# Many planners, crashes, clocks


async def test_planners_at_once_plan_each_occurrence_exactly_once(
    db: Connection, planner: Pool, now: datetime
) -> None:
    await make.given_many(db, make.schedule(next_fire_at=now, recurrence=make.every(2, now)), 200)
    hearts = [Heard() for _ in range(4)]
    for _ in range(3):  # what one skips because another holds it is planned by the next turn at the latest
        await asyncio.gather(*(plan(planner, heard, batch=7) for heard in hearts))
    announced = [ref.id for heard in hearts for ref in heard.runs]
    assert len(announced) == len(set(announced)) == 600
    assert await db.fetchval("SELECT count(*) FROM job_run") == 600
    assert await db.fetchval("SELECT count(*) FROM schedule WHERE next_fire_at = $1", now + 6 * SECOND) == 200


@pytest.mark.parametrize("verb", ["insert_runs", "advance"])
async def test_run_and_pointer_appear_together_or_not_at_all(
    db: Connection, planner: Pool, now: datetime, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """procrastinate#1495: the mark was written, the process died, and the occurrence never fired."""
    [one] = await given(db, now)
    real = getattr(planning, verb)

    async def dies_after(conn: Connection, values: Any) -> None:
        await real(conn, values)
        raise StoreUnavailable

    monkeypatch.setattr(planning, verb, dies_after)
    with pytest.raises(StoreUnavailable):
        await plan(planner)
    assert await make.runs_of(db, one) == []
    assert (await make.plain(db, one))["next_fire_at"] == now
    monkeypatch.undo()
    assert (await plan(planner)).runs == 1


async def test_a_database_that_is_away_ends_the_turn_with_the_error_that_loops_back_off_from(
    planner: Pool,
) -> None:
    await close_pool(planner)
    with pytest.raises(StoreUnavailable):
        await plan(planner)


async def test_occurrences_that_have_their_run_are_counted_and_passed(
    db: Connection, planner: Pool, now: datetime
) -> None:
    [one] = await given(db, now)
    await plan(planner)
    await make.alter(db, one, {"next_fire_at": now})  # an operator's replan
    before = counted("replans")
    heard = Heard()
    planned = await plan(planner, heard)
    assert (planned.runs, planned.replans, planned.schedules) == (0, 1, 1)
    assert counted("replans") == before + 1
    assert heard.runs == []
    assert await make.instants_of(db, one) == [now]
    assert (await make.plain(db, one))["next_fire_at"] == now + HOUR


async def test_a_clock_that_goes_back_is_an_alarm_and_no_stop(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime, caplog: pytest.LogCaptureFixture
) -> None:
    body = Planner(planner, Heard(), PlannerSettings())
    one = await make.given(db, make.schedule(next_fire_at=now, recurrence=make.every(60, now)))
    await body.plan_due()
    await frozen_clock.tick(-10 * MINUTE)
    [new] = await given(db, now - 10 * MINUTE)
    with caplog.at_level(logging.ERROR):
        await body.plan_due()
    assert [record.message for record in caplog.records] == ["planner.clock_went_back"]
    assert await make.instants_of(db, new) == [now - 10 * MINUTE]
    await frozen_clock.set(now + MINUTE)
    await body.plan_due()
    assert await make.instants_of(db, one) == [now, now + MINUTE]


async def test_a_clock_that_leaps_ahead_and_is_corrected_doubles_and_loses_nothing(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    one = await make.given(
        db, make.schedule(next_fire_at=now, recurrence=Cron("*/10 * * * *", "UTC"), misfire=Misfire.FIRE_ALL)
    )
    await plan(planner)
    await frozen_clock.tick(HOUR)
    await plan(planner)
    for minutes in range(0, 90, 5):
        await frozen_clock.set(now + minutes * MINUTE)
        await plan(planner)
    assert await make.instants_of(db, one) == [now + n * 10 * MINUTE for n in range(9)]


# Catching up


@pytest.mark.parametrize("outage", [3 * HOUR, 14 * 24 * HOUR])
async def test_after_an_outage_the_schedule_comes_back_by_itself_with_a_bounded_catch_up(
    db: Connection, planner: Pool, now: datetime, outage: timedelta
) -> None:
    """kubernetes#42649 never started again after 100 misses; Hangfire#1591 made up for every one of them."""
    one = await make.given(db, make.schedule(next_fire_at=now - outage, recurrence=Cron("* * * * *", "UTC")))
    for _ in range(40):
        await plan(planner)
    assert (await make.plain(db, one))["next_fire_at"] == now + MINUTE
    # The latest one that was missed, and those that are late by no more than the grace.
    assert await make.instants_of(db, one) == [now - 2 * MINUTE, now - MINUTE, now]
    stretches = await make.dispositions_of(db, one)
    assert sum(count for _, _, count, _ in stretches) == outage // MINUTE - 2
    assert {reason for *_, reason in stretches} == {"misfire"}
    assert (stretches[0][0], stretches[-1][1]) == (now - outage, now - 3 * MINUTE)


async def test_every_skipped_occurrence_is_counted_by_its_reason(
    db: Connection, planner: Pool, now: datetime
) -> None:
    await make.given(
        db, make.schedule(next_fire_at=now - HOUR, recurrence=make.every(600), misfire=Misfire.SKIP)
    )
    before = counted("misfires", reason="misfire")
    planned = await plan(planner)
    assert planned.skipped == {"misfire": 6}
    assert counted("misfires", reason="misfire") == before + 6


async def test_two_seconds_of_delay_lose_nothing_under_any_policy(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    """apscheduler#146."""
    made = [
        await make.given(
            db, make.schedule(next_fire_at=now, recurrence=make.every(3600, now), misfire=misfire)
        )
        for misfire in Misfire
    ]
    await frozen_clock.tick(2 * SECOND)
    await plan(planner)
    for one in made:
        assert await make.instants_of(db, one) == [now]


async def test_a_schedule_made_beside_another_does_not_make_that_fire_again(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    """apscheduler#5."""
    [one] = await given(db, now)
    await plan(planner)
    await frozen_clock.tick(10 * SECOND)
    [other] = await given(db, now + 12 * SECOND)
    await plan(planner)
    assert await make.instants_of(db, one) == [now]
    assert await make.instants_of(db, other) == [now + 12 * SECOND]


async def test_whether_an_occurrence_fires_does_not_depend_on_history(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    """sidekiq-cron PR#73, openclaw#42640: a job fired again because the record of its last run was gone."""
    [one] = await given(db, now)
    await plan(planner)
    await db.execute("DELETE FROM job_run")
    await frozen_clock.tick(30 * MINUTE)
    assert (await plan(planner)).batches == 0
    assert await make.runs_of(db, one) == []


async def test_a_steady_rhythm_has_no_gaps_whatever_the_turns(
    db: Connection, planner: Pool, frozen_clock: FrozenClock, now: datetime
) -> None:
    """dkron#1210, pg-boss#914: due-ness depends on the pointer alone, never on a look-back or on who ticked last."""
    one = await make.given(
        db, make.schedule(next_fire_at=now, recurrence=make.every(5), misfire=Misfire.SKIP)
    )
    for step in (1, 5, 45, 1, 1, 20, 59, 2, 61, 1):
        await plan(planner)
        await frozen_clock.tick(step * SECOND)
    await plan(planner)
    instants = await make.instants_of(db, one)
    assert instants == [now + n * 5 * SECOND for n in range(len(instants))]
    assert instants[-1] >= now + 195 * SECOND


async def test_a_turn_works_on_every_server(each_server_dsn: str) -> None:
    async with make.planner_pool(each_server_dsn) as pool, acquire(pool) as conn:
        at = (await planning.database_now(conn)).replace(microsecond=0)
        async with transaction(pool) as writer:
            good = (await given(writer, at, 9))[0]
            bad = await make.given(
                writer, make.schedule(next_fire_at=at, recurrence=Cron("0 * * * *", "Mars/Olympus"))
            )
        heard = Heard()
        planned = await plan(pool, heard)
        assert (planned.runs, planned.quarantined) == (9, 1)
        assert len(heard.runs) == 9
        assert await make.instants_of(conn, good) == [at]
        assert (await make.plain(conn, bad))["status"] == "error"
