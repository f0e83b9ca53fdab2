from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from app.domain.ids import ScheduleId
from app.domain.recurrence import Cron, Every, Once, Recurrence
from app.domain.retry import RetryPolicy
from app.domain.schedule import Damaged, Misfire, Overlap, ScheduleStatus
from app.domain.target import Target
from app.errors import Conflict, NotFound
from app.store import edits, schedules
from app.store.pool import Connection, translated
from tests import factories_schedules as make


@pytest.mark.parametrize(
    "recurrence",
    [
        Cron("H/5 8-18 * * 1-5", "Europe/Berlin"),
        Every(timedelta(milliseconds=1_500), make.EPOCH + timedelta(milliseconds=1)),
        Once(make.EPOCH),
    ],
)
async def test_a_schedule_is_read_as_it_was_written(db: Connection, recurrence: Recurrence) -> None:
    one = replace(
        make.schedule(
            next_fire_at=make.EPOCH, recurrence=recurrence, misfire=Misfire.SKIP, overlap=Overlap.SKIP
        ),
        name="Ünïcode ✓",
        target=Target("PUT", "https://example.com/x?y=%20", (("X-A", "1"), ("X-B", "ü")), '{"a": "é"}'),
        retry=RetryPolicy(3, timedelta(seconds=1.5), 3.0, timedelta(hours=2)),
        expires_after=timedelta(days=2, milliseconds=3),
        status_reason="why",
        version=7,
        last_fire_at=make.EPOCH - timedelta(hours=1),
    )
    await make.given(db, one)
    assert await schedules.get(db, one.tenant_id, one.id) == one
    assert await schedules.list_page(db, one.tenant_id, limit=10) == [one]


async def test_an_id_is_taken_once(db: Connection) -> None:
    one = await make.given(db, make.schedule(next_fire_at=make.EPOCH))
    with pytest.raises(Conflict), translated():
        await make.given(db, one)


async def test_a_schedule_is_not_written_under_another_tenant(db: Connection) -> None:
    with pytest.raises(ValueError, match="own tenant"):
        await schedules.insert(db, make.tenant(), make.schedule(next_fire_at=make.EPOCH))


async def test_unknown_foreign_and_deleted_look_the_same(db: Connection) -> None:
    one = await make.given(db, make.schedule(next_fire_at=make.EPOCH))
    gone = await make.given(db, make.schedule(next_fire_at=None, status=ScheduleStatus.DELETED))
    messages = set()
    for tenant, id_ in (
        (make.tenant(), one.id),
        (one.tenant_id, ScheduleId(uuid4())),
        (gone.tenant_id, gone.id),
    ):
        with pytest.raises(NotFound) as missing:
            await schedules.get(db, tenant, id_)
        messages.add(str(missing.value))
    assert len(messages) == 1
    assert await schedules.list_page(db, gone.tenant_id, limit=10) == []


async def test_pages_show_each_schedule_once_newest_first_even_among_equal_times(db: Connection) -> None:
    tenant = make.tenant()
    made = [
        await make.given(
            db,
            make.schedule(
                next_fire_at=make.EPOCH,
                tenant_id=tenant,
                created_at=make.EPOCH + timedelta(microseconds=n // 4),
            ),
        )
        for n in range(10)
    ]
    await make.given(db, make.schedule(next_fire_at=make.EPOCH))
    seen = []
    after = None
    while page := await schedules.list_page(db, tenant, after=after, limit=3):
        seen += page
        after = (page[-1].created_at, page[-1].id)
        # Newer ones that appear meanwhile move nothing.
        await make.given(
            db,
            make.schedule(
                next_fire_at=make.EPOCH, tenant_id=tenant, created_at=make.EPOCH + timedelta(days=1)
            ),
        )
    assert seen == sorted(made, key=lambda one: (one.created_at, one.id), reverse=True)


async def test_a_page_can_be_of_one_status(db: Connection) -> None:
    tenant = make.tenant()
    states = [one for one in ScheduleStatus if one is not ScheduleStatus.DELETED]
    made = {
        status: await make.given(db, make.schedule(next_fire_at=make.EPOCH, tenant_id=tenant, status=status))
        for status in states
    }
    for status in states:
        assert await schedules.list_page(db, tenant, status=status, limit=10) == [made[status]]
    assert await schedules.list_page(db, tenant, status=ScheduleStatus.DELETED, limit=10) == []


@pytest.mark.parametrize(
    ("column", "damage"),
    [
        ("recurrence", '{"kind": "moon"}'),
        ("target", '{"kind": "moon"}'),
        ("retry", '{"kind": "moon"}'),
        ("retry", '{"max_attempts": 3, "base_seconds": 1e308, "factor": 1e308, "cap_seconds": 1}'),
    ],
)
async def test_a_row_that_cannot_be_understood_is_seen_and_can_be_deleted(
    db: Connection, column: str, damage: str
) -> None:
    one = await make.given(db, make.schedule(next_fire_at=make.EPOCH))
    await make.alter(db, one, {column: damage})
    seen = await schedules.get(db, one.tenant_id, one.id)
    assert isinstance(seen, Damaged)
    assert (seen.id, seen.name) == (one.id, one.name)
    assert await schedules.list_page(db, one.tenant_id, limit=10) == [seen]
    with pytest.raises(Conflict, match="can only be deleted"):
        await edits.pause(db, one.tenant_id, one.id)
    await edits.delete(db, one.tenant_id, one.id)
    assert (await make.plain(db, one))["status"] == "deleted"


async def test_a_page_is_one_walk_along_the_tenants_index(db: Connection) -> None:
    one = make.schedule(next_fire_at=make.EPOCH)
    await make.given_many(db, one, 5_000, tenants=5)
    await db.execute("ANALYZE schedule")
    plan = await db.fetch(f"EXPLAIN {schedules.LIST_PAGE}", one.tenant_id, *schedules.NEWEST, None, 50)
    text = "\n".join(row[0] for row in plan)
    assert "schedule_tenant" in text
    assert "Sort" not in text
