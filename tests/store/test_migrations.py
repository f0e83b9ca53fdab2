"""The migrations runner."""

from __future__ import annotations

import asyncio

from app.store.migrations import apply_all, require_current, status
from app.store.partitions import attached_range, current_month
from app.store.pool import close, connect


async def test_twenty_migrators_at_once_apply_each_file_once(each_server_empty_dsn: str) -> None:
    results = await asyncio.gather(*(apply_all(each_server_empty_dsn) for _ in range(20)))
    assert sorted(version for applied in results for version in applied) == [
        found.version for found in await status(each_server_empty_dsn)
    ]
    await require_current(each_server_empty_dsn)


async def test_a_fresh_database_has_months_to_plan_for(each_server_empty_dsn: str) -> None:
    await apply_all(each_server_empty_dsn)
    conn = await connect(each_server_empty_dsn, application_name="t")
    try:
        (span,) = await attached_range(conn)
        month = await current_month(conn)
        assert (span.start, span.end) == (month.start, month.plus(3).end)
    finally:
        await close(conn)
