"""The history's statements: pages by key, one partition per id, the tenant first in every index."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from app.domain.ids import ScheduleId, TenantId, run_id
from app.errors import NotFound
from app.store import history
from app.store.history import Place, RunRecord, ShownStatus, Window
from app.store.pool import Connection
from tests.factories_history import add_attempt, add_runs, add_schedule, lease

NOON = datetime(2026, 3, 31, 12, tzinfo=UTC)
WINDOW = Window(NOON - timedelta(days=40), NOON + timedelta(days=40))
MANUAL = timedelta(microseconds=123_456)


def new_ids() -> tuple[TenantId, ScheduleId]:
    return TenantId(uuid4()), ScheduleId(uuid4())


async def walk(
    conn: Connection,
    tenant: TenantId,
    *,
    window: Window = WINDOW,
    schedule: ScheduleId | None = None,
    statuses: Collection[ShownStatus] = (),
    limit: int = 10,
) -> list[RunRecord]:
    """All pages of a walk."""
    seen: list[RunRecord] = []
    place: Place | None = None
    while True:
        page = await history.list_runs(
            conn, tenant, window=window, after=place, schedule=schedule, statuses=statuses, limit=limit
        )
        assert len(page.runs) <= limit
        seen += page.runs
        place = page.next_place
        if place is None:
            return seen


@pytest.mark.parametrize("limit", [1, 3, 10, 199, 200])
async def test_rows_of_one_instant_are_each_seen_once(db: Connection, limit: int) -> None:
    tenant, _ = new_ids()
    occurrences = [(ScheduleId(uuid4()), NOON + MANUAL) for _ in range(25)]
    made = await add_runs(db, tenant, occurrences)

    seen = [run.id for run in await walk(db, tenant, limit=limit)]
    assert seen == sorted(made, reverse=True)


async def test_a_walk_crosses_months_newest_first(each_server_db: Connection) -> None:
    tenant, schedule = new_ids()
    occurrences = [(schedule, NOON + timedelta(days=day)) for day in range(-35, 36, 5)]
    made = await add_runs(each_server_db, tenant, occurrences)
    await add_schedule(each_server_db, tenant, schedule)

    assert [run.id for run in await walk(each_server_db, tenant, limit=4)] == made[::-1]
    assert [run.id for run in await walk(each_server_db, tenant, schedule=schedule, limit=4)] == made[::-1]


async def test_a_page_ends_with_the_window_and_begins_inside_it(db: Connection) -> None:
    tenant, schedule = new_ids()
    made = await add_runs(db, tenant, [(schedule, NOON + timedelta(hours=hour)) for hour in range(5)])

    window = Window(NOON + timedelta(hours=1), NOON + timedelta(hours=4))
    assert [run.id for run in await walk(db, tenant, window=window)] == made[3:0:-1]


async def test_inserts_between_pages_hide_and_repeat_nothing(db: Connection) -> None:
    tenant, schedule = new_ids()
    made = await add_runs(db, tenant, [(schedule, NOON + timedelta(minutes=2 * n)) for n in range(20)])

    seen: list[UUID] = []
    place: Place | None = None
    for turn in range(20):
        page = await history.list_runs(
            db, tenant, window=WINDOW, after=place, schedule=None, statuses=(), limit=2
        )
        seen += [run.id for run in page.runs]
        place = page.next_place
        if place is None:
            break
        between = [NOON + timedelta(minutes=2 * turn + 1), NOON + timedelta(minutes=100 + turn)]
        await add_runs(db, tenant, [(schedule, instant) for instant in between])
    assert place is None
    assert len(seen) == len(set(seen))
    assert set(made) <= set(seen)


async def test_a_filter_finds_every_fitting_run_beyond_the_bound_of_one_look(
    db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SCAN_LIMIT", 7)
    tenant, schedule = new_ids()
    await add_schedule(db, tenant, schedule)
    instants = [NOON + timedelta(minutes=n) for n in range(60)]
    await add_runs(db, tenant, [(schedule, one) for one in instants if one.minute % 13])
    failed = await add_runs(
        db, tenant, [(schedule, one) for one in instants if not one.minute % 13], status="failed"
    )

    for narrowed in (None, schedule):
        found = await walk(db, tenant, schedule=narrowed, statuses=[ShownStatus.FAILED], limit=2)
        assert [run.id for run in found] == failed[::-1]


async def test_running_is_an_open_run_under_a_live_lease(db: Connection) -> None:
    tenant, schedule = new_ids()
    open_runs = await add_runs(
        db, tenant, [(schedule, NOON + timedelta(hours=n)) for n in range(3)], status="pending"
    )
    await lease(db, open_runs[0], until=timedelta(minutes=1))
    await lease(db, open_runs[1], until=timedelta(minutes=-1))

    shown = {run.id: run.status for run in await walk(db, tenant)}
    assert shown == dict(
        zip(open_runs, [ShownStatus.RUNNING, ShownStatus.PENDING, ShownStatus.PENDING], strict=True)
    )
    running = await walk(db, tenant, statuses=[ShownStatus.RUNNING])
    assert [run.id for run in running] == open_runs[:1]
    assert (await history.get_run(db, tenant, open_runs[0])).status is ShownStatus.RUNNING


async def test_another_tenants_runs_do_not_exist(db: Connection) -> None:
    (mine, _), (other, schedule) = new_ids(), new_ids()
    await add_schedule(db, other, schedule)
    (run,) = await add_runs(db, other, [(schedule, NOON)])
    await add_attempt(db, other, run, NOON, 1, late=timedelta(seconds=1))

    assert await walk(db, mine) == []
    assert await walk(db, mine, schedule=schedule) == []
    assert await history.list_attempts(db, mine, run) == []
    with pytest.raises(NotFound):
        await history.get_run(db, mine, run)


@pytest.mark.parametrize(
    "unknown",
    [
        UUID(int=0),
        UUID(int=2**128 - 1),
        UUID("0d1e2f3a-4b5c-4d6e-8f70-8192a3b4c5d6"),
        run_id(ScheduleId(UUID(int=7)), NOON),
    ],
    ids=["nil", "max", "of another version", "of no run"],
)
async def test_an_id_of_no_run_is_not_found(db: Connection, unknown: UUID) -> None:
    with pytest.raises(NotFound):
        await history.get_run(db, TenantId(uuid4()), unknown)
    assert await history.list_attempts(db, TenantId(uuid4()), unknown) == []


async def test_lateness_is_that_of_the_first_attempt(db: Connection) -> None:
    tenant, schedule = new_ids()
    at = NOON + MANUAL
    (run,) = await add_runs(db, tenant, [(schedule, at)])
    assert (await history.get_run(db, tenant, run)).lateness is None
    await add_attempt(db, tenant, run, at, 2, late=timedelta(seconds=30))
    await add_attempt(db, tenant, run, at, 1, late=timedelta(milliseconds=40))

    found = await history.get_run(db, tenant, run)
    assert found.lateness == timedelta(milliseconds=42)
    assert [attempt.attempt for attempt in await history.list_attempts(db, tenant, run)] == [1, 2]
    assert (await walk(db, tenant))[0] == found


async def explain(conn: Connection, statement: str, *arguments: object) -> dict[str, Any]:
    async with conn.transaction():
        await conn.execute(history.IN_INDEX_ORDER)
        text = await conn.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}", *arguments
        )
    plan: dict[str, Any] = json.loads(text)[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for inner in plan.get("Plans", ()) for node in nodes(inner))]


def opened(plan: dict[str, Any], parent: str) -> set[str]:
    """The partitions of `parent` that were really read."""
    return {
        node["Relation Name"]
        for node in nodes(plan)
        if node.get("Relation Name", "").startswith(parent) and node["Actual Loops"] > 0
    }


async def big_and_small(conn: Connection) -> tuple[TenantId, TenantId, ScheduleId]:
    """A tenant with 30,000 runs in two months, and one with three, among them."""
    (big, schedule), (small, another) = new_ids(), new_ids()
    instants = [NOON - timedelta(days=15) + timedelta(minutes=1.5 * n) for n in range(30_000)]
    await add_schedule(conn, big, schedule)
    await add_runs(conn, big, [(schedule, instant) for instant in instants])
    await add_runs(conn, small, [(another, NOON + timedelta(hours=hour)) for hour in range(3)])
    return big, small, schedule


@pytest.mark.parametrize("analysed", ["analysed", "not analysed"])
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_page_reads_its_index_backwards_and_stops(
    each_server_db: Connection, analysed: str, mode: str
) -> None:
    db = each_server_db
    big, small, schedule = await big_and_small(db)
    if analysed == "analysed":
        await db.execute("ANALYZE job_run")
    await db.execute(f"SET plan_cache_mode = {mode}")
    shown = sorted(ShownStatus)
    last = UUID(int=2**128 - 1)

    for tenant in (big, small):
        bounds = (tenant, WINDOW.from_at, WINDOW.to_at, NOON)
        plan = await explain(db, history.LIST_TENANT_RUNS, *bounds, last, shown, history.SCAN_LIMIT, 51)
        assert blocks(plan) < 1_000, json.dumps(plan, indent=1)
        assert_index(plan, "_tenant_id_scheduled_for_id_idx")
    bounds = (big, WINDOW.from_at, WINDOW.to_at, NOON)
    plan = await explain(db, history.LIST_SCHEDULE_RUNS, *bounds, schedule, shown, history.SCAN_LIMIT, 51)
    assert blocks(plan) < 1_000, json.dumps(plan, indent=1)
    assert_index(plan, "_schedule_id_scheduled_for_key")


def assert_index(plan: dict[str, Any], ending: str) -> None:
    """All reading of runs goes through this index, and nothing is sorted."""
    reads = [node for node in nodes(plan) if node.get("Relation Name", "").startswith("job_run")]
    assert reads
    assert all(node.get("Index Name", "").endswith(ending) for node in reads), json.dumps(plan, indent=1)
    assert all(node["Node Type"] != "Sort" for node in nodes(plan)), json.dumps(plan, indent=1)


def blocks(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def test_only_the_partitions_of_the_window_and_of_the_id_are_read(db: Connection) -> None:
    tenant, _small, schedule = await big_and_small(db)
    shown = sorted(ShownStatus)
    march = Window(datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC))
    arguments = (
        tenant,
        march.from_at,
        march.to_at,
        march.to_at,
        history.FIRST,
        shown,
        history.SCAN_LIMIT,
        51,
    )
    for mode in ("force_custom_plan", "force_generic_plan"):
        await db.execute(f"SET plan_cache_mode = {mode}")
        assert opened(await explain(db, history.LIST_TENANT_RUNS, *arguments), "job_run") == {
            "job_run_2026_03"
        }
        run = run_id(schedule, NOON)
        within = (NOON, NOON + timedelta(milliseconds=1))
        assert opened(await explain(db, history.GET_RUN, tenant, run, *within), "job_run") == {
            "job_run_2026_03"
        }
        attempts = await explain(db, history.LIST_ATTEMPTS, tenant, run, *within)
        assert opened(attempts, "run_attempt") == {"run_attempt_2026_03"}
