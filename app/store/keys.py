"""API keys at rest: an id, the SHA-256 of the secret, and what the key may do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime

from app.domain.api_key import MintedKey, Scope
from app.domain.ids import TenantId
from app.errors import NotFound
from app.store.pool import Connection, Row


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key that is neither revoked nor expired by the database's clock; whether the secret fits is still
    open.
    """

    tenant_id: TenantId
    scopes: frozenset[Scope]
    secret_sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What may be shown of a key: everything but its secret."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


FIND_KEY = """
SELECT tenant_id, scopes, secret_sha256
  FROM api_key
 WHERE id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""


async def find(conn: Connection, key_id: str) -> StoredKey | None:
    """The live key with this id, whoever it belongs to: it is the key that tells who the tenant is."""
    row = await conn.fetchrow(FIND_KEY, key_id)
    if row is None:
        return None
    scopes = frozenset(scope for scope in Scope if scope in row["scopes"])
    return StoredKey(TenantId(row["tenant_id"]), scopes, row["secret_sha256"])


INSERT_KEY = """
INSERT INTO api_key (id, tenant_id, name, secret_sha256, scopes, created_at, expires_at)
SELECT $2, tenant.id, $3, $4, $5, now(), $6
  FROM tenant
 WHERE tenant.id = $1
RETURNING id, name, scopes, created_at, expires_at, revoked_at
"""


async def insert(
    conn: Connection,
    tenant: TenantId,
    key: MintedKey,
    *,
    name: str,
    scopes: Collection[Scope],
    expires_at: datetime | None,
) -> KeyRecord:
    """Adds a key to the tenant. Raises NotFound for an unknown tenant."""
    row = await conn.fetchrow(INSERT_KEY, tenant, key.id, name, key.secret_sha256, sorted(scopes), expires_at)
    if row is None:
        raise NotFound
    return _record(row)


LIST_KEYS = """
SELECT id, name, scopes, created_at, expires_at, revoked_at
  FROM api_key
 WHERE tenant_id = $1 AND (created_at, id) > ($2, $3)
 ORDER BY created_at, id
 LIMIT $4
"""


async def list_page(
    conn: Connection, tenant: TenantId, *, after: tuple[datetime, str], limit: int
) -> list[KeyRecord]:
    """Up to `limit` keys of the tenant behind `after` = (created_at, id), oldest first, revoked ones
    included.
    """
    return [_record(row) for row in await conn.fetch(LIST_KEYS, tenant, *after, limit)]


REVOKE_KEY = """
UPDATE api_key
   SET revoked_at = coalesce(revoked_at, now())
 WHERE tenant_id = $1 AND id = $2
RETURNING id, name, scopes, created_at, expires_at, revoked_at
"""


async def revoke(conn: Connection, tenant: TenantId, key_id: str) -> KeyRecord:
    """Ends the key's validity for good; revoking twice keeps the first time. Raises NotFound."""
    row = await conn.fetchrow(REVOKE_KEY, tenant, key_id)
    if row is None:
        raise NotFound
    return _record(row)


def _record(row: Row) -> KeyRecord:
    scopes = tuple(row["scopes"])
    return KeyRecord(row["id"], row["name"], scopes, row["created_at"], row["expires_at"], row["revoked_at"])
