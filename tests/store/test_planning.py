"""The planner's statements, one by one, on a clock that stands still."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.domain.ids import MICROSECOND, ScheduleId, run_id
from app.domain.plan import Skipped
from app.domain.schedule import Schedule, ScheduleStatus, SkipReason
from app.errors import PartitionMissing, RowRefused
from app.store import planning
from app.store.planning import EVER, LEFT_END, Advance, Band, NewDisposition, NewRun, Place
from app.store.pool import PLAN_GUARDS, Connection, Pool, acquire, close, connect, transaction
from tests import factories_schedules as make
from tests.frozen import FrozenClock

ON_TIME = Band(reach=timedelta(seconds=10), ahead=timedelta(seconds=5))
OVERDUE = Band(reach=EVER, ahead=timedelta(seconds=-10))


@pytest.fixture
async def now(frozen_clock: FrozenClock) -> datetime:
    return await make.mid_month(frozen_clock)


@pytest.fixture
async def planner(dsn: str, frozen_clock: FrozenClock) -> AsyncIterator[Pool]:
    async with make.planner_pool(dsn, clock=frozen_clock) as pool:
        yield pool


async def locked_ids(
    pool: Pool, band: Band, *, limit: int = 100, behind: Place = LEFT_END
) -> list[ScheduleId]:
    async with transaction(pool) as conn:
        return [row.id for row in (await planning.lock_due(conn, band, limit=limit, behind=behind)).rows]


async def test_the_bands_meet_without_gap_or_overlap_and_end_at_the_look_ahead(
    db: Connection, planner: Pool, now: datetime
) -> None:
    offsets = [-400 * 86_400, -3600, -10.000001, -10, -9.999999, 0, 5, 5.000001]
    made = [
        await make.given(db, make.schedule(next_fire_at=now + timedelta(seconds=offset)))
        for offset in offsets
    ]
    ids = [one.id for one in made]
    # Exactly `reach` ago belongs to the overdue; the keyset comparison needs an id above nil to say
    # otherwise.
    overdue, on_time = await locked_ids(planner, OVERDUE), await locked_ids(planner, ON_TIME)
    assert overdue == ids[:4]
    assert on_time in (ids[3:7], ids[4:7])
    assert set(ids) - {*overdue, *on_time} == {ids[7]}


@pytest.mark.parametrize("status", [one for one in ScheduleStatus if one is not ScheduleStatus.ACTIVE])
async def test_only_active_schedules_are_due(
    db: Connection, planner: Pool, now: datetime, status: ScheduleStatus
) -> None:
    await make.given(db, make.schedule(next_fire_at=now, status=status))
    assert await locked_ids(planner, ON_TIME) == []


async def test_a_batch_goes_on_behind_the_last_row_even_among_equal_instants(
    db: Connection, planner: Pool, now: datetime
) -> None:
    made = [await make.given(db, make.schedule(next_fire_at=now)) for _ in range(7)]
    expected = sorted(one.id for one in made)
    seen: list[ScheduleId] = []
    behind = LEFT_END
    while page := await locked_ids(planner, ON_TIME, limit=3, behind=behind):
        seen += page
        behind = Place(now, page[-1])
    assert seen == expected


async def test_rows_come_with_the_clock_and_everything_planning_needs(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now, expires_after=timedelta(hours=3)))
    async with transaction(planner) as conn:
        locked = await planning.lock_due(conn, ON_TIME, limit=1)
    assert locked.now == now
    [row] = locked.rows
    assert (row.id, row.tenant_id, row.version, row.next_fire_at) == (one.id, one.tenant_id, 1, now)
    assert (row.misfire, row.expires_after) == ("fire_once", timedelta(hours=3))
    assert json.loads(row.recurrence) == {"kind": "cron", "cron": "0 * * * *", "timezone": "UTC"}
    assert json.loads(row.retry)["max_attempts"] == 5


async def test_nothing_due_is_no_row_and_no_clock(planner: Pool) -> None:
    async with transaction(planner) as conn:
        assert await planning.lock_due(conn, ON_TIME, limit=1) == planning.Locked(None, [])


async def test_an_interval_beyond_pythons_range_does_not_stop_the_batch(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now))
    other = await make.given(db, make.schedule(next_fire_at=now))
    await db.execute("UPDATE schedule SET expires_after = '100000000 years' WHERE id = $1", one.id)
    assert set(await locked_ids(planner, ON_TIME)) == {one.id, other.id}


async def test_two_planners_at_once_lock_different_schedules(
    db: Connection, planner: Pool, now: datetime
) -> None:
    for _ in range(5):
        await make.given(db, make.schedule(next_fire_at=now))
    async with transaction(planner) as one, transaction(planner) as two:
        first = await planning.lock_due(one, ON_TIME, limit=3)
        second = await planning.lock_due(two, ON_TIME, limit=10)
    assert (len(first.rows), len(second.rows)) == (3, 2)
    assert {row.id for row in first.rows}.isdisjoint(row.id for row in second.rows)


async def test_a_schedule_under_edit_is_not_waited_for(
    pool: Pool, db: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now))
    other = await make.given(db, make.schedule(next_fire_at=now))
    async with transaction(pool) as editor:
        await editor.execute("SELECT 1 FROM schedule WHERE id = $1 FOR UPDATE", one.id)
        assert await locked_ids(planner, ON_TIME) == [other.id]


async def test_lock_again_takes_only_what_is_still_as_it_was_read(
    db: Connection, planner: Pool, now: datetime
) -> None:
    made = [await make.given(db, make.schedule(next_fire_at=now)) for _ in range(4)]
    async with transaction(planner) as conn:
        rows = (await planning.lock_due(conn, ON_TIME, limit=9)).rows
    await make.alter(db, made[0], {"version": 2})
    await make.alter(db, made[1], {"next_fire_at": now + timedelta(hours=1)})
    await make.alter(db, made[2], {"status": "paused"})
    async with transaction(planner) as conn:
        assert await planning.lock_again(conn, rows) == {made[3].id}


def a_run(one: Schedule, at: datetime, *, max_attempts: int = 5) -> NewRun:
    id_ = run_id(one.id, at)
    return NewRun(id_, at, one.tenant_id, one.id, one.version, max_attempts, at + timedelta(days=1))


async def test_new_runs_are_due_at_their_instant_and_known_by_their_id(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = make.schedule(next_fire_at=now)
    async with transaction(planner) as conn:
        [ref] = await planning.insert_runs(conn, [a_run(one, now)])
    [row] = await make.runs_of(db, one)
    assert (ref.id, ref.tenant_id, ref.scheduled_for, ref.fire_after) == (row["id"], one.tenant_id, now, now)
    assert row["idempotency_key"] == row["id"] == run_id(one.id, now)
    assert (row["origin"], row["status"], row["attempt"], row["max_attempts"]) == (
        "schedule",
        "pending",
        0,
        5,
    )
    assert (row["fire_after"], row["expires_at"]) == (now, now + timedelta(days=1))
    assert (row["claimed_by"], row["finished_at"], row["schedule_version"]) == (None, None, 1)
    assert row["created_at"] == now


async def test_only_runs_that_are_new_are_returned_and_the_old_ones_stay_as_they_are(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = make.schedule(next_fire_at=now)
    instants = [now + timedelta(minutes=n) for n in range(3)]
    async with transaction(planner) as conn:
        await planning.insert_runs(conn, [a_run(one, instants[1])])
    await db.execute("UPDATE job_run SET status = 'succeeded', finished_at = now()")
    async with transaction(planner) as conn:
        refs = await planning.insert_runs(conn, [a_run(one, at) for at in reversed(instants)])
    assert [ref.scheduled_for for ref in refs] == [instants[0], instants[2]]
    assert [row["status"] for row in await make.runs_of(db, one)] == ["pending", "succeeded", "pending"]


async def test_a_month_that_is_not_attached_is_told_apart_from_bad_data(planner: Pool, now: datetime) -> None:
    one = make.schedule(next_fire_at=now)
    with pytest.raises(PartitionMissing):
        async with transaction(planner) as conn:
            await planning.insert_runs(conn, [a_run(one, now + timedelta(days=3650))])
    with pytest.raises(RowRefused):
        async with transaction(planner) as conn:
            await planning.insert_runs(conn, [a_run(one, now, max_attempts=9)])


async def advanced(pool: Pool, one: Advance) -> set[ScheduleId]:
    async with transaction(pool) as conn:
        return await planning.advance(conn, [one])


async def test_the_pointer_moves_forward_from_the_value_read(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now))
    later = now + timedelta(hours=1)
    assert await advanced(planner, Advance(one.id, now, later, now)) == {one.id}
    row = await make.plain(db, one)
    assert (row["next_fire_at"], row["last_fire_at"], row["status"], row["version"]) == (
        later,
        now,
        "active",
        1,
    )
    assert row["updated_at"] == one.updated_at
    assert await advanced(planner, Advance(one.id, later, later + timedelta(hours=1), None)) == {one.id}
    assert (await make.plain(db, one))["last_fire_at"] == now


async def test_without_a_further_occurrence_the_schedule_is_finished(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now))
    assert await advanced(planner, Advance(one.id, now, None, now)) == {one.id}
    row = await make.plain(db, one)
    assert (row["status"], row["next_fire_at"]) == ("finished", None)


@pytest.mark.parametrize("step", [timedelta(0), -MICROSECOND, timedelta(hours=-1)])
async def test_the_pointer_never_stands_or_goes_back(
    db: Connection, planner: Pool, now: datetime, step: timedelta
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now))
    assert await advanced(planner, Advance(one.id, now, now + step, None)) == set()
    assert (await make.plain(db, one))["next_fire_at"] == now


@pytest.mark.parametrize("change", [{"status": "paused"}, {"next_fire_at": datetime(2026, 1, 1, tzinfo=UTC)}])
async def test_a_planner_that_slept_does_not_move_what_others_have_changed(
    db: Connection, planner: Pool, now: datetime, change: dict[str, object]
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=now))
    await make.alter(db, one, change)
    before = await make.plain(db, one)
    assert await advanced(planner, Advance(one.id, now, now + timedelta(hours=1), now)) == set()
    assert await make.plain(db, one) == before


async def test_a_stretch_recorded_twice_keeps_the_longer_one(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = make.schedule(next_fire_at=now)
    for minutes in (5, 9, 2):
        skipped = Skipped(now, now + timedelta(minutes=minutes), minutes + 1, SkipReason.MISFIRE)
        async with transaction(planner) as conn:
            await planning.record_skipped(conn, [NewDisposition(one.tenant_id, one.id, skipped)])
    assert await make.dispositions_of(db, one) == [(now, now + timedelta(minutes=9), 10, "misfire")]


async def test_quarantine_is_visible_and_touches_nothing_that_changed_meanwhile(
    db: Connection, planner: Pool, now: datetime
) -> None:
    made = [await make.given(db, make.schedule(next_fire_at=now)) for _ in range(4)]
    async with transaction(planner) as conn:
        rows = (await planning.lock_due(conn, ON_TIME, limit=9)).rows
    await make.alter(db, made[1], {"version": 2})
    await make.alter(db, made[2], {"next_fire_at": now + timedelta(hours=1)})
    reasons = {one.id: "bad \0 rule \ud800 " + "x" * 1000 for one in made[:3]}
    async with transaction(planner) as conn:
        assert await planning.quarantine(conn, reasons, rows) == {made[0].id}
    row = await make.plain(db, made[0])
    assert (row["status"], row["version"], row["next_fire_at"]) == ("error", 2, now)
    assert row["updated_at"] == now
    assert row["status_reason"].startswith("bad � rule ? x")
    assert len(row["status_reason"]) == 500
    assert [(await make.plain(db, one))["status"] for one in made[1:]] == ["active"] * 3


async def test_every_statement_runs_on_every_server(each_server_dsn: str) -> None:
    conn = await connect(each_server_dsn, application_name="carillon tests", settings=PLAN_GUARDS)
    try:
        at = (await planning.database_now(conn)).replace(microsecond=0)
        one = await make.given(conn, make.schedule(next_fire_at=at))
        async with conn.transaction():
            [row] = (await planning.lock_due(conn, ON_TIME, limit=5)).rows
            assert await planning.lock_again(conn, [row]) == {one.id}
            assert len(await planning.insert_runs(conn, [a_run(one, at)])) == 1
            skipped = Skipped(at, at, 1, SkipReason.MISFIRE)
            await planning.record_skipped(conn, [NewDisposition(one.tenant_id, one.id, skipped)])
            later = at + timedelta(hours=1)
            assert await planning.advance(conn, [Advance(one.id, at, later, at)]) == {one.id}
            moved = row._replace(next_fire_at=later)
            assert await planning.quarantine(conn, {one.id: "why"}, [moved]) == {one.id}
    finally:
        await close(conn)


@pytest.fixture(params=["analysed", "never analysed"])
def is_analysed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "analysed")


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
async def test_locking_walks_the_due_index_in_order_from_where_it_left_off(
    each_server_dsn: str, is_analysed: bool, mode: str
) -> None:
    guards = {**PLAN_GUARDS, "plan_cache_mode": mode}
    conn = await connect(each_server_dsn, application_name="carillon tests", settings=guards)
    try:
        await conn.execute("ALTER TABLE schedule SET (autovacuum_enabled = off)")
        at = (await planning.database_now(conn)).replace(microsecond=0) + timedelta(seconds=4)
        await make.given_many(conn, make.schedule(next_fire_at=at - timedelta(hours=1)), 10_000, tenants=50)
        await make.given_many(conn, make.schedule(next_fire_at=at), 10_000, tenants=50)
        if is_analysed:
            await conn.execute("ANALYZE schedule")
        last = await conn.fetchval(
            "SELECT id FROM schedule WHERE next_fire_at = $1 ORDER BY id OFFSET 9000 LIMIT 1", at
        )
        await conn.execute(
            f"PREPARE look (timestamptz, uuid, interval, interval, bigint) AS {planning.LOCK_DUE}"
        )
        trees = [await explained(conn, behind=behind) for behind in (LEFT_END, Place(at, last))]
    finally:
        await close(conn)
    for tree in trees:
        nodes = list(walk(tree))
        assert [node["Node Type"] for node in nodes] == ["Limit", "LockRows", "Index Scan"]
        assert nodes[2]["Index Name"] == "schedule_due"
        assert nodes[0]["Actual Rows"] == 500
        assert nodes[2].get("Rows Removed by Filter", 0) == 0
        # One page per row and some of the index. A scan that began elsewhere would pass 9,000 entries more.
        assert nodes[2]["Shared Hit Blocks"] + nodes[2]["Shared Read Blocks"] < 535


async def explained(conn: Connection, *, behind: Place) -> dict[str, Any]:
    text = await conn.fetchval(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE look("
        f"'{behind.next_fire_at.isoformat()}', '{behind.id}', '10 seconds', '5 seconds', 500)"
    )
    tree: dict[str, Any] = json.loads(text)[0]["Plan"]
    return tree


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from walk(child)


async def test_a_batch_statement_takes_an_empty_and_a_large_batch(
    db: Connection, planner: Pool, now: datetime
) -> None:
    one = make.schedule(next_fire_at=now)
    instants = [now + timedelta(milliseconds=n) for n in range(5_000)]
    async with transaction(planner) as conn:
        assert await planning.insert_runs(conn, []) == []
        assert await planning.advance(conn, []) == set()
        await planning.record_skipped(conn, [])
        refs = await planning.insert_runs(conn, [a_run(one, at) for at in instants])
    assert [ref.scheduled_for for ref in refs] == instants
    async with acquire(planner) as conn:
        assert await conn.fetchval("SELECT count(*) FROM job_run") == 5_000
