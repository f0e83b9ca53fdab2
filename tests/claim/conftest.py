from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from app.store.pool import PLAN_GUARDS, Pool, close_pool, create_pool


@pytest.fixture
async def claim_pool(dsn: str) -> AsyncIterator[Pool]:
    """A pool as the claims of a replica use it: with the plan guards."""
    opened = await create_pool(dsn, size=4, application_name="carillon tests, claim", settings=PLAN_GUARDS)
    yield opened
    await close_pool(opened)
