"""The migrations runner: once each, in order, never half, and never a changed past."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from app.errors import SchemaMismatch, StoreUnavailable
from app.store import migrations
from app.store.migrations import State, apply_all, folder, require_contained, require_current, status
from app.store.partitions import attached_range, current_month
from app.store.pool import Connection, close, connect
from tests.eventually import eventually
from tests.schema_dump import dump_schema, write_if_asked
from tests.servers import EMBEDDED, Servers

TABLES = (
    "SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
)
HOLD_LOCK = "SELECT pg_advisory_lock(4919231476)"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the real history that a test may spoil."""
    return Path(shutil.copytree(folder(), tmp_path / "migrations"))


@pytest.fixture
async def empty(empty_dsn: str) -> AsyncIterator[Connection]:
    conn = await connect(empty_dsn, application_name="t")
    yield conn
    await close(conn)


def _add(place: Path, name: str, text: str) -> str:
    """Write the next file of a history; returns its full name."""
    number = 1 + max(int(path.name[:4]) for path in place.glob("[0-9]*.sql"))
    path = place / f"{number:04}_{name}.sql"
    path.write_text(text)
    return path.name


async def test_twenty_migrators_at_once_apply_each_file_once(each_server_empty_dsn: str) -> None:
    results = await asyncio.gather(*(apply_all(each_server_empty_dsn) for _ in range(20)))
    known = [found.version for found in await status(each_server_empty_dsn)]
    assert sorted(version for applied in results for version in applied) == known
    assert [found.state for found in await status(each_server_empty_dsn)] == [State.APPLIED] * len(known)
    await require_current(each_server_empty_dsn)


async def test_applying_again_does_nothing(dsn: str) -> None:
    assert await apply_all(dsn) == []


async def test_a_fresh_database_has_months_to_plan_for(each_server_empty_dsn: str) -> None:
    await apply_all(each_server_empty_dsn)
    conn = await connect(each_server_empty_dsn, application_name="t")
    (span,) = await attached_range(conn)
    month = await current_month(conn)
    assert (span.start, span.end) == (month.start, month.plus(3).end)
    await close(conn)


async def test_status_of_an_empty_database_says_pending_and_changes_nothing(
    empty_dsn: str, empty: Connection
) -> None:
    states = await status(empty_dsn)
    assert {found.state for found in states} == {State.PENDING}
    assert states[0].name == "0001_tenant.sql"
    assert await empty.fetch(TABLES) == []


async def test_an_older_database_is_refused_by_serve_and_brought_up_by_migrate(
    dsn: str, db: Connection, place: Path
) -> None:
    name = _add(place, "later", "CREATE TABLE later (id int);")
    for database in (dsn, db):
        with pytest.raises(SchemaMismatch, match=rf"older.*{name}.*carillon migrate"):
            await require_current(database, place=place)
    assert await apply_all(dsn, place=place) == [int(name[:4])]
    await require_current(db, place=place)


async def test_a_newer_database_is_refused_and_left_alone(dsn: str, place: Path) -> None:
    name = _add(place, "later", "CREATE TABLE later (id int);")
    await apply_all(dsn, place=place)
    for refused in (apply_all(dsn), require_current(dsn)):
        with pytest.raises(SchemaMismatch, match=f"newer.*{name}"):
            await refused


async def test_a_newer_database_still_serves_a_replica_that_runs(
    dsn: str, db: Connection, place: Path
) -> None:
    _add(place, "later", "CREATE TABLE later (id int);")
    await apply_all(dsn, place=place)
    await require_contained(db)
    _add(place, "latest", "CREATE TABLE latest (id int);")
    with pytest.raises(SchemaMismatch, match="older"):
        await require_contained(db, place=place)


async def test_edited_history_is_refused_and_named(dsn: str, place: Path) -> None:
    path = place / "0002_schedule.sql"
    path.write_text(path.read_text() + "-- a harmless remark\n")
    _add(place, "later", "CREATE TABLE later (id int);")
    for refused in (apply_all(dsn, place=place), require_current(dsn, place=place)):
        with pytest.raises(SchemaMismatch, match=r"0002_schedule\.sql was changed"):
            await refused
    states = {found.version: found.state for found in await status(dsn, place=place)}
    assert states[2] is State.EDITED


async def test_line_ends_of_another_system_are_no_edit(dsn: str, place: Path) -> None:
    for path in sorted(place.glob("*.sql")):  # noqa: ASYNC240  # a test's own small files
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    await require_current(dsn, place=place)


async def test_a_database_with_a_hole_in_its_past_is_refused(dsn: str, db: Connection) -> None:
    await db.execute("DELETE FROM schema_migration WHERE version = 2")
    for refused in (apply_all(dsn), require_current(dsn)):
        with pytest.raises(SchemaMismatch, match=r"has 0003_run\.sql but not 0002_schedule\.sql"):
            await refused


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("0002_schedule.sql", None, r"0003_run\.sql: the number 0003 comes without 0002"),
        ("0001_tenant.sql", None, "0002_schedule.sql: the number 0002 comes without 0001"),
        ("0003_run.sql", "0002_run.sql", r"the number 0002 is used twice"),
        ("0003_run.sql", "3_run.sql", r"3_run\.sql: the name must look like"),
        ("0003_run.sql", "0003-run.sql", r"0003-run\.sql: the name must look like"),
    ],
)
async def test_files_with_a_gap_a_double_or_no_number_are_refused_before_anything_runs(
    empty_dsn: str, empty: Connection, place: Path, old: str, new: str | None, told: str
) -> None:
    if new is None:
        (place / old).unlink()
    else:
        (place / old).rename(place / new)
    with pytest.raises(SchemaMismatch, match=told):
        await apply_all(empty_dsn, place=place)
    assert await empty.fetch(TABLES) == []


async def test_a_failing_file_changes_nothing_and_is_named_with_its_line(
    dsn: str, db: Connection, place: Path
) -> None:
    _add(place, "good", "CREATE TABLE good (id int);")
    bad = _add(place, "bad", "CREATE TABLE half (id int);\n\nSELECT no_such_column\nFROM tenant;\n")
    with pytest.raises(SchemaMismatch, match=rf"(?s){bad}, line 3: .*no_such_column.*not applied"):
        await apply_all(dsn, place=place)
    tables = {row["relname"] for row in await db.fetch(TABLES)}
    assert "good" in tables
    assert "half" not in tables
    assert {found.name: found.state for found in await status(dsn, place=place)}[bad] is State.PENDING
    (place / bad).write_text("CREATE TABLE whole (id int);")
    assert await apply_all(dsn, place=place) == [int(bad[:4])]


async def test_a_file_cannot_end_its_own_transaction(dsn: str, db: Connection, place: Path) -> None:
    bad = _add(place, "bad", "CREATE TABLE half (id int);\nCOMMIT;\nSELECT 1/0;")
    with pytest.raises(SchemaMismatch, match=rf"{bad}: a file runs in one transaction"):
        await apply_all(dsn, place=place)
    assert await db.fetchval("SELECT to_regclass('half')") is None


async def test_a_concurrent_index_is_built_outside_a_transaction_and_recorded(
    each_server_dsn: str, place: Path
) -> None:
    text = "-- no transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS tenant_name ON tenant (name);\n"
    name = _add(place, "index", text)
    results = await asyncio.gather(*(apply_all(each_server_dsn, place=place) for _ in range(10)))
    assert [version for applied in results for version in applied] == [int(name[:4])]
    await require_current(each_server_dsn, place=place)


async def test_an_index_build_that_broke_off_is_begun_anew(dsn: str, db: Connection, place: Path) -> None:
    await db.execute("INSERT INTO tenant SELECT gen_random_uuid(), 'same', now() FROM generate_series(1, 2)")
    text = "-- no transaction\nCREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS one_name ON tenant (name);\n"
    name = _add(place, "index", text)
    with pytest.raises(SchemaMismatch, match=f"{name}.*could not create unique index"):
        await apply_all(dsn, place=place)
    invalid = "SELECT NOT indisvalid FROM pg_index WHERE indexrelid = 'one_name'::regclass"
    assert await db.fetchval(invalid) is True
    await db.execute("UPDATE tenant SET name = id::text")
    assert await apply_all(dsn, place=place) == [int(name[:4])]
    assert await db.fetchval(invalid) is False


async def test_a_file_without_transaction_holds_one_statement(dsn: str, db: Connection, place: Path) -> None:
    text = "-- no transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS a ON tenant (name);\nCREATE TABLE half ();\n"
    name = _add(place, "two", text)
    with pytest.raises(SchemaMismatch, match=name):
        await apply_all(dsn, place=place)
    assert await db.fetchval("SELECT to_regclass('half')") is None


async def test_a_migrator_does_not_wait_for_ever_for_another(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "LOCK_WAIT", timedelta(seconds=0.3))
    await db.execute(HOLD_LOCK)
    with pytest.raises(StoreUnavailable, match=r"another migration has been running for more than 0\.3 s"):
        await apply_all(dsn)


async def test_a_file_that_cannot_have_its_lock_waits_a_little_and_begins_anew(
    dsn: str, db: Connection, place: Path
) -> None:
    name = _add(place, "column", "ALTER TABLE tenant ADD COLUMN remark text;")
    reader = db.transaction()
    await reader.start()
    await db.fetch("SELECT id FROM tenant")
    task = asyncio.create_task(apply_all(dsn, place=place))
    watch = await connect(dsn, application_name="watch")

    async def waits() -> bool:
        question = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'tenant'::regclass"
        return bool(await watch.fetchval(question) == 1)

    assert await eventually(waits)

    async def gave_up() -> bool:
        return not await waits()

    assert await eventually(gave_up)  # so that others do not queue behind it for ever
    await reader.rollback()
    assert await task == [int(name[:4])]
    await close(watch)


def test_the_dump_of_the_schema_is_the_one_in_the_repository(servers: Servers) -> None:
    """Write it anew with WRITE_SCHEMA=1."""
    server = servers.get(EMBEDDED)
    dsn = server.create_migrated(apply_all)
    dump = dump_schema(dsn)
    server.drop(dsn)
    write_if_asked(dump)
    assert (folder() / "schema.sql").read_text() == dump


def test_the_folder_of_a_source_tree_is_found() -> None:
    assert (folder() / "0001_tenant.sql").is_file()
