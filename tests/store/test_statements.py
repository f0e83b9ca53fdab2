"""Every SQL text of the store against the real schema, and the plans of the hot ones against 100,000 due rows.

What is asserted of a plan: the right index, LIMIT innermost (the index scan yields little more than the limit), no
sequential scan of runs, no sort of the backlog, and a bounded number of pages. Never a time.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import ModuleType
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import app.store
from app.domain.run import ClaimedRun, Complete, Retry, Settled, Settlement
from app.store import claims, leases, orders, partitions, planning, settlements
from app.store.claims import LEFT_END, Share
from app.store.migrations import apply_all
from app.store.pool import PLAN_GUARDS, Connection, close, connect
from tests.factories_runs import SECOND, TTL, evidence, grant, seed_backlog, tenant_number
from tests.servers import DatabaseServer, run

RUNS = 100_000
SCHEDULES = 10_000
TENANTS = 1_000
LIMIT = 100

VERB = re.compile(r"\s*(WITH|SELECT|INSERT|UPDATE|DELETE|VALUES|MERGE)\b")


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(app.store.__path__, "app.store."):
        yield importlib.import_module(found.name)


STATEMENTS = {
    f"{module.__name__.removeprefix('app.store.')}.{name}": text
    for module in _modules()
    for name, text in vars(module).items()
    if name.isupper() and not name.startswith("_") and isinstance(text, str) and VERB.match(text)
}


def test_the_search_for_statements_finds_them() -> None:
    assert len(STATEMENTS) > 40
    assert {"claims.CLAIM_DUE", "leases.EXTEND", "settlements.COMPLETE", "planning.LOCK_DUE"} <= set(
        STATEMENTS
    )


@pytest.mark.parametrize("settings", [{}, PLAN_GUARDS], ids=["plain", "guarded"])
async def test_every_statement_fits_the_schema(each_server_dsn: str, settings: Mapping[str, str]) -> None:
    conn = await connect(each_server_dsn, application_name="carillon tests, statements", settings=settings)
    refused: dict[str, str] = {}
    try:
        for name, text in STATEMENTS.items():
            try:
                await conn.prepare(text)
            except asyncpg.PostgresError as error:
                refused[name] = str(error)
    finally:
        await close(conn)
    assert refused == {}


def test_no_statement_names_a_clock_that_a_test_cannot_set() -> None:
    unset = re.compile(r"current_timestamp|localtimestamp|pg_catalog\.now|statement_timestamp", re.I)
    assert [name for name, text in STATEMENTS.items() if unset.search(text)] == []


# ---------------------------------------------------------------------------------------------------------- plans


SEED = """
INSERT INTO schedule (id, tenant_id, name, status, version, recurrence, target, retry, misfire, overlap, expires_after,
                      next_fire_at, created_at, updated_at)
SELECT lpad(to_hex(g), 32, '0')::uuid, lpad(to_hex(1 + g % $2), 32, '0')::uuid, 'seeded', 'active', 1, '{}', '{}',
       '{}', 'fire_once', 'allow', '1 day', now() - interval '1 second', now(), now()
  FROM generate_series(1, $1::int) AS g
"""

SEED_RUNS = """
INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version, idempotency_key, origin, status,
                     fire_after, attempt, max_attempts, expires_at, created_at)
SELECT lpad(to_hex(g), 32, '0')::uuid, ($3::timestamptz[])[1 + g % cardinality($3)] + g * interval '1 millisecond',
       lpad(to_hex(1 + g % $2), 32, '0')::uuid, lpad(to_hex(1 + g % $4), 32, '0')::uuid, 1,
       lpad(to_hex(g), 32, '0')::uuid, 'schedule', 'pending', now() - interval '1 minute', 0, 5,
       now() + interval '1 day', now()
  FROM generate_series(1, $1::int) AS g
"""


async def _seed(dsn: str, months: int) -> None:
    conn = await connect(dsn, application_name="carillon tests, seed", settings={"statement_timeout": "60s"})
    try:
        first = await partitions.current_month(conn)
        for offset in range(months):
            await partitions.ensure_month(conn, first.plus(offset))
        for (name,) in await conn.fetch(
            "SELECT relid::regclass::text FROM pg_partition_tree('job_run') WHERE isleaf"
        ):
            await conn.execute(f"ALTER TABLE {name} SET (autovacuum_enabled = false)")
        await conn.execute("ALTER TABLE schedule SET (autovacuum_enabled = false)")
        await conn.execute(SEED, SCHEDULES, TENANTS)
        starts = [first.plus(offset).start for offset in range(months)]
        await conn.execute(SEED_RUNS, RUNS, TENANTS, starts, SCHEDULES)
    finally:
        await close(conn)


async def _analyse(dsn: str) -> None:
    conn = await connect(dsn, application_name="carillon tests, seed", settings={"statement_timeout": "60s"})
    try:
        await conn.execute("ANALYZE job_run, schedule")
    finally:
        await close(conn)


@dataclass(slots=True)
class Backlog:
    """A database with the backlog."""

    dsn: str
    months: int
    is_analysed: bool = False


@pytest.fixture(scope="module")
def backlogs(each_server: DatabaseServer) -> Iterator[dict[int, Backlog]]:
    """By number of months; each is made when it is first asked for."""
    made: dict[int, Backlog] = {}
    yield made
    for backlog in made.values():
        each_server.drop(backlog.dsn)


STATES = [(4, "never analysed"), (4, "analysed"), (16, "never analysed"), (16, "analysed")]


@pytest.fixture(scope="module", params=STATES, ids=lambda state: f"{state[0]} months {state[1]}")
def known(
    request: pytest.FixtureRequest, each_server: DatabaseServer, backlogs: dict[int, Backlog]
) -> Backlog:
    """The backlog over 4 and 16 months, first as it is in the first hours of a month, then with statistics."""
    months, state = request.param
    if months not in backlogs:
        backlogs[months] = Backlog(each_server.create_migrated(apply_all), months)
        run(_seed(backlogs[months].dsn, months))
    backlog = backlogs[months]
    if state == "analysed" and not backlog.is_analysed:
        run(_analyse(backlog.dsn))
        backlog.is_analysed = True
    assert backlog.is_analysed == (state == "analysed"), "the order of the states was changed"
    return backlog


GENERIC = {"plan_cache_mode": "force_generic_plan"}
CUSTOM = {"plan_cache_mode": "force_custom_plan"}


@asynccontextmanager
async def _undone(dsn: str, settings: Mapping[str, str]) -> AsyncIterator[Connection]:
    """A connection in a transaction that is rolled back at the end."""
    opened = await connect(dsn, application_name="carillon tests, plans", settings=settings)
    try:
        current = opened.transaction()
        await current.start()
        yield opened
        await current.rollback()
    finally:
        await close(opened)


@pytest.fixture(params=[GENERIC, CUSTOM], ids=["generic", "custom"])
async def guarded(request: pytest.FixtureRequest, known: Backlog) -> AsyncIterator[Connection]:
    """As the claim's and the planner's connections are, with either kind of plan."""
    async with _undone(known.dsn, {**PLAN_GUARDS, **request.param}) as opened:
        yield opened


@pytest.fixture
async def plain(known: Backlog) -> AsyncIterator[Connection]:
    """As all other connections are."""
    async with _undone(known.dsn, {}) as opened:
        yield opened


CUSTOM_PLANS = 5
"""So often a session plans for the very values; then it compares, and may plan once for all (plancache.c)."""

each_turn = pytest.mark.parametrize("before", [0, CUSTOM_PLANS], ids=["at first", "later"])


@dataclass(frozen=True, slots=True)
class Node:
    """One node of an executed plan. `rows` is over all loops."""

    kind: str
    relation: str
    index: str
    rows: int
    removed: int


@dataclass(frozen=True, slots=True)
class Plan:
    nodes: list[Node]
    pages: int

    def scans_of(self, table: str) -> list[Node]:
        return [node for node in self.nodes if node.relation.startswith(table) and "Scan" in node.kind]


async def _explain(conn: Connection, statement: str, *arguments: object, before: int = 0) -> Plan:
    """Execute the statement as the session would after `before` executions; the fixture undoes it.

    EXPLAIN EXECUTE goes through the plan cache; EXPLAIN of the text itself would always make a custom plan.
    """
    types = (await conn.prepare(statement)).get_parameters()
    kinds = f"({', '.join(kind.name for kind in types)})" if types else ""
    values = f"({', '.join(_literal(value) for value in arguments)})" if arguments else ""
    await conn.execute(f"PREPARE explained {kinds} AS {statement}")
    for _ in range(before):
        await conn.execute(f"EXPLAIN EXECUTE explained{values}")
    text = await conn.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained{values}")
    await conn.execute("DEALLOCATE explained")
    [answer] = json.loads(text)
    root = answer["Plan"]
    nodes = list(_nodes(root))
    return Plan(nodes, root["Shared Hit Blocks"] + root["Shared Read Blocks"])


def _nodes(node: Mapping[str, object]) -> Iterator[Node]:
    loops = int(str(node["Actual Loops"]))
    yield Node(
        kind=str(node["Node Type"]),
        relation=str(node.get("Relation Name", "")),
        index=str(node.get("Index Name", "")),
        rows=round(float(str(node["Actual Rows"])) * loops),
        removed=round(float(str(node.get("Rows Removed by Filter", 0))) * loops),
    )
    children = node.get("Plans", [])
    assert isinstance(children, list)
    for child in children:
        yield from _nodes(child)


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        inner = ",".join(
            "NULL" if item is None else '"' + _plain(item).replace('"', '\\"') + '"' for item in value
        )
        return "'{" + inner.replace("'", "''") + "}'"
    return "'" + _plain(value).replace("'", "''") + "'"


def _plain(value: object) -> str:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return f"{value.total_seconds()} seconds"
        case _:
            return str(value)


def _assert_bounded(plan: Plan, *, months: int, index: str, rows: int, pages: int) -> None:
    scans = plan.scans_of("job_run")
    assert scans
    assert {node.kind for node in scans} <= {"Index Scan", "Index Only Scan", "LockRows"}, plan
    found = [node for node in scans if re.search(index, node.index)]
    assert found, f"no scan of {index}: {[node.index for node in scans]}"
    # A merge of the months looks one row ahead in each of them.
    assert sum(node.rows + node.removed for node in found) <= rows + months, found
    assert all(node.rows <= 2 * rows + months for node in plan.nodes if "Sort" in node.kind), plan
    assert plan.pages <= pages, f"{plan.pages} pages"


async def _assert_found_by_key(
    conn: Connection, known: Backlog, statement: str, *arguments: object, before: int
) -> None:
    """The first plans may read the runs from end to end, once, where that is not much; later ones never do."""
    plan = await _explain(conn, statement, *arguments, before=before)
    if before:
        _assert_bounded(plan, months=known.months, index=KEY, rows=2 * LIMIT, pages=LIMIT * PAGES_PER_ROW)
    else:
        assert plan.pages <= await _table_pages(conn) + LIMIT * PAGES_PER_ROW


async def _table_pages(conn: Connection) -> int:
    pages: int = await conn.fetchval(
        "SELECT sum(pg_relation_size(relid) / 8192)::int FROM pg_partition_tree('job_run') WHERE isleaf"
    )
    return pages


DUE = r"job_run_\d+_\d+_fire_after_id_idx"
TENANT_DUE = r"job_run_\d+_\d+_tenant_id_fire_after_id_idx"
KEY = r"job_run_\d+_\d+_pkey"

PAGES_PER_ROW = 60


async def test_claim_oldest_reads_little_more_than_its_limit(guarded: Connection, known: Backlog) -> None:
    terms = grant()
    plan = await _explain(
        guarded, claims.CLAIM_DUE, terms.token, TTL, timedelta(), LEFT_END.fire_after, LEFT_END.id, LIMIT
    )
    _assert_bounded(plan, months=known.months, index=DUE, rows=LIMIT, pages=LIMIT * PAGES_PER_ROW)


async def test_claim_in_turns_reads_little_more_than_its_shares(guarded: Connection, known: Backlog) -> None:
    for tenants, each in ((100, 1), (25, 4), (1, 100)):
        shares = [Share(tenant_number(number), each, LEFT_END) for number in range(1, tenants + 1)]
        plan = await _explain(
            guarded,
            claims.CLAIM_RING,
            grant().token,
            TTL,
            timedelta(),
            [share.tenant_id for share in shares],
            [share.limit for share in shares],
            [share.behind.fire_after for share in shares],
            [share.behind.id for share in shares],
        )
        ahead = known.months * tenants
        _assert_bounded(
            plan, months=ahead, index=TENANT_DUE, rows=tenants * each, pages=LIMIT * PAGES_PER_ROW
        )


async def test_claim_hinted_reads_its_hints(guarded: Connection, known: Backlog) -> None:
    rows = await guarded.fetch(
        "SELECT id, scheduled_for, tenant_id FROM job_run ORDER BY fire_after, id LIMIT $1", LIMIT
    )
    plan = await _explain(
        guarded,
        claims.CLAIM_HINTED,
        grant().token,
        TTL,
        timedelta(),
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
    )
    _assert_bounded(plan, months=known.months, index=KEY, rows=2 * LIMIT, pages=LIMIT * PAGES_PER_ROW)


async def test_due_tenants_are_walked_over_by_a_loose_scan(guarded: Connection, known: Backlog) -> None:
    plan = await _explain(guarded, claims.DUE_TENANTS, UUID(int=0), TENANTS, timedelta())
    _assert_bounded(
        plan,
        months=known.months,
        index=TENANT_DUE,
        rows=TENANTS * (known.months + 2),
        pages=TENANTS * (known.months + 2) * 8,
    )
    # The history index has the tenants in order too, with everything that has ended.
    assert [node for node in plan.scans_of("job_run") if not re.search(TENANT_DUE, node.index)] == []


async def test_the_next_due_run_is_one_step_into_the_index(guarded: Connection, known: Backlog) -> None:
    plan = await _explain(guarded, claims.NEXT_DUE)
    # Entries that rolled back planning has left behind now are looked at too.
    _assert_bounded(plan, months=known.months, index=DUE, rows=1, pages=known.months * 8 + 10 * LIMIT)


async def test_a_pass_of_the_reaper_reads_its_slice(guarded: Connection, known: Backlog) -> None:
    limit = 1000
    plan = await _explain(guarded, leases.REAP, LEFT_END.fire_after, LEFT_END.id, limit, TTL)
    _assert_bounded(plan, months=known.months, index=DUE, rows=limit, pages=limit * 20)


async def _held(conn: Connection) -> list[ClaimedRun]:
    return await claims.claim_due(conn, grant(), limit=LIMIT)


@each_turn
async def test_keeping_and_giving_back_find_their_runs_by_key(
    plain: Connection, known: Backlog, before: int
) -> None:
    held = [run.lease for run in await _held(plain)]
    columns = ([x.ref.id for x in held], [x.ref.scheduled_for for x in held], [x.token for x in held])
    for statement in (leases.EXTEND, leases.STILL_OURS, leases.RELEASE):
        arguments = (*columns, TTL) if statement is leases.EXTEND else columns
        await _assert_found_by_key(plain, known, statement, *arguments, before=before)


# The others are built from the same text.
SETTLING: list[tuple[str, Settlement, Callable[[Settled], tuple[Any, ...]]]] = [
    (settlements.COMPLETE, Complete(), settlements._answered),
    (settlements.RETRY, Retry(SECOND), settlements._any_end),
]


@each_turn
async def test_settling_finds_its_runs_by_key(guarded: Connection, known: Backlog, before: int) -> None:
    """From the first group on: a plan made while the month was small is kept when it has grown."""
    for statement, settlement, row in SETTLING:
        items = [Settled(run.lease, settlement, evidence()) for run in await _held(guarded)]
        columns: list[Any] = [list(column) for column in zip(*map(row, items), strict=True)]
        if statement == settlements.COMPLETE:
            columns.append(len(items))
        plan = await _explain(guarded, statement, *columns, before=before)
        _assert_bounded(plan, months=known.months, index=KEY, rows=2 * LIMIT, pages=LIMIT * PAGES_PER_ROW)


async def test_a_group_is_found_by_key_in_a_month_that_has_just_begun(db: Connection, dsn: str) -> None:
    """Six thousand runs are few enough to be hashed for a large group, unless the session forbids it."""
    first = await partitions.current_month(db)
    await seed_backlog(db, 6_000, tenants=10, months=[first.start])
    conn = await connect(dsn, application_name="carillon tests, settling", settings=PLAN_GUARDS)
    try:
        items = [
            Settled(run.lease, Complete(), evidence())
            for run in await claims.claim_due(conn, grant(), limit=400)
        ]
        columns = [list(column) for column in zip(*map(settlements._answered, items), strict=True)]
        plan = await _explain(conn, settlements.COMPLETE, *columns, len(items), before=0)
    finally:
        await close(conn)
    assert len(items) == 400
    assert plan.pages <= 400 * PAGES_PER_ROW


@each_turn
async def test_overlaps_are_found_in_one_pass_over_the_open_runs_of_the_tenants(
    plain: Connection, known: Backlog, before: int
) -> None:
    runs = await plain.fetch(
        "SELECT id, scheduled_for, schedule_id FROM job_run WHERE tenant_id = $1", tenant_number(5)
    )
    ids, instants, schedules = (list(column) for column in zip(*runs, strict=True))
    plan = await _explain(
        plain, orders.OVERLAPPING, ids, instants, [tenant_number(5)], schedules, before=before
    )
    if before:
        read = sum(node.rows + node.removed for node in plan.scans_of("job_run"))
        assert read <= 2 * len(runs)  # a bitmap and its heap count twice
    else:
        assert plan.pages <= await _table_pages(plain) + LIMIT * PAGES_PER_ROW


async def test_due_schedules_are_locked_in_the_order_of_their_index(guarded: Connection) -> None:
    behind = planning.LEFT_END
    plan = await _explain(
        guarded, planning.LOCK_DUE, behind.next_fire_at, behind.id, planning.EVER, timedelta(seconds=5), LIMIT
    )
    [scan] = plan.scans_of("schedule")
    assert (scan.kind, scan.index) == ("Index Scan", "schedule_due")
    assert scan.rows + scan.removed <= LIMIT
    assert not [node for node in plan.nodes if "Sort" in node.kind]
    assert plan.pages <= LIMIT * 5


async def _some_schedules(conn: Connection) -> Sequence[tuple[UUID, UUID, datetime]]:
    rows = await conn.fetch(
        "SELECT id, tenant_id, next_fire_at FROM schedule WHERE status = 'active' ORDER BY next_fire_at, id LIMIT $1",
        LIMIT,
    )
    return [tuple(row) for row in rows]


async def test_planning_writes_without_reading_the_backlog(guarded: Connection) -> None:
    due = await _some_schedules(guarded)
    ids = [row[0] for row in due]
    read = [row[2] for row in due]
    later = [at + timedelta(hours=1) for at in read]
    start = (await partitions.current_month(guarded)).start + timedelta(days=27)
    at = [start + place * SECOND for place in range(LIMIT)]
    inserting = await _explain(
        guarded,
        planning.INSERT_RUNS,
        ids,
        at,
        [row[1] for row in due],
        ids,
        [1] * LIMIT,
        [5] * LIMIT,
        later,
        LIMIT,
    )
    assert inserting.scans_of("job_run") == []
    assert inserting.pages <= LIMIT * 60
    for statement, arguments in (
        (planning.LOCK_AGAIN, (ids, [1] * LIMIT, read)),
        (planning.ADVANCE, (ids, read, later, read, LIMIT)),
    ):
        plan = await _explain(guarded, statement, *arguments)
        [scan] = plan.scans_of("schedule")
        assert (scan.kind, scan.rows) == ("Index Scan", LIMIT)
        assert scan.index in ("schedule_pkey", "schedule_due")  # it knows both columns of either
        assert plan.pages <= LIMIT * 20
