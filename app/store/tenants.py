"""Tenants: whose schedules and runs are whose. Only the administrator's routes and the quick start call
this.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.domain.ids import TenantId
from app.errors import NotFound
from app.store.pool import Connection


@dataclass(frozen=True, slots=True)
class Tenant:
    id: TenantId
    name: str
    created_at: datetime


INSERT_TENANT = """
INSERT INTO tenant (id, name, created_at)
VALUES ($1, $2, now())
RETURNING created_at
"""


async def insert(conn: Connection, tenant: TenantId, *, name: str) -> Tenant:
    """Adds a tenant (name: 1 to 200 characters). A known id raises Conflict through the pool's
    translation.
    """
    row = await conn.fetchrow(INSERT_TENANT, tenant, name)
    assert row is not None
    return Tenant(tenant, name, row["created_at"])


GET_TENANT = """
SELECT name, created_at FROM tenant WHERE id = $1
"""


async def get(conn: Connection, tenant: TenantId) -> Tenant:
    """The tenant. Raises NotFound."""
    row = await conn.fetchrow(GET_TENANT, tenant)
    if row is None:
        raise NotFound
    return Tenant(tenant, row["name"], row["created_at"])


LIST_TENANTS = """
SELECT id, name, created_at
  FROM tenant
 WHERE id > $1
 ORDER BY id
 LIMIT $2
"""


async def list_page(conn: Connection, *, after: UUID, limit: int) -> list[Tenant]:
    """Up to `limit` tenants with ids behind `after`, in the order of their ids (the nil id starts)."""
    rows = await conn.fetch(LIST_TENANTS, after, limit)
    return [Tenant(TenantId(row["id"]), row["name"], row["created_at"]) for row in rows]
