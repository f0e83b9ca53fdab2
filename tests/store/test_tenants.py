"""Tenants and keys at rest. (Through the routes: tests/api/test_tenants.py.)"""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from app.domain import api_key
from app.domain.api_key import MintedKey, Scope
from app.domain.ids import TenantId
from app.errors import Conflict, NotFound
from app.store import keys, tenants
from app.store.pool import Connection, translated

BEGINNING = (datetime(1970, 1, 1, tzinfo=UTC), "")


async def new_tenant(db: Connection) -> TenantId:
    return (await tenants.insert(db, TenantId(uuid4()), name="acme")).id


async def new_key(db: Connection, tenant: TenantId, **changes: object) -> MintedKey:
    minted = api_key.mint(secrets.token_bytes)
    wanted = {"name": "backend", "scopes": [Scope.READ], "expires_at": None, **changes}
    await keys.insert(db, tenant, minted, **wanted)  # type: ignore[arg-type]
    return minted


async def test_a_tenant_reads_back_and_an_unknown_one_is_not_found(each_server_db: Connection) -> None:
    db = each_server_db
    made = await tenants.insert(db, TenantId(uuid4()), name="acme")
    assert await tenants.get(db, made.id) == made
    with pytest.raises(NotFound):
        await tenants.get(db, TenantId(uuid4()))


async def test_an_id_is_given_once(db: Connection) -> None:
    tenant = await new_tenant(db)
    with pytest.raises(Conflict), translated():
        await tenants.insert(db, tenant, name="another")


async def test_pages_of_tenants_begin_behind_the_last_id(db: Connection) -> None:
    made = sorted([await new_tenant(db) for _ in range(5)])
    first = await tenants.list_page(db, after=UUID(int=0), limit=3)
    rest = await tenants.list_page(db, after=first[-1].id, limit=3)
    assert [tenant.id for tenant in first + rest] == made


async def test_a_live_key_is_found_with_its_tenant_and_scopes(each_server_db: Connection) -> None:
    db = each_server_db
    tenant = await new_tenant(db)
    minted = await new_key(db, tenant, expires_at=datetime.now(UTC) + timedelta(hours=1))
    found = await keys.find(db, minted.id)
    assert found is not None
    assert (found.tenant_id, found.scopes) == (tenant, frozenset({Scope.READ}))
    assert found.secret_sha256 == minted.secret_sha256


async def test_expired_revoked_and_unknown_keys_are_not_found(db: Connection) -> None:
    tenant = await new_tenant(db)
    expired = await new_key(db, tenant, expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    revoked = await new_key(db, tenant)
    await keys.revoke(db, tenant, revoked.id)
    for key_id in (expired.id, revoked.id, "a" * 16, ""):
        assert await keys.find(db, key_id) is None


async def test_a_scope_of_a_later_version_is_passed_over(db: Connection) -> None:
    minted = await new_key(db, await new_tenant(db))
    await db.execute("UPDATE api_key SET scopes = '{read,replay}' WHERE id = $1", minted.id)
    found = await keys.find(db, minted.id)
    assert found is not None
    assert found.scopes == frozenset({Scope.READ})


async def test_a_key_needs_its_tenant(db: Connection) -> None:
    with pytest.raises(NotFound):
        await new_key(db, TenantId(uuid4()))


async def test_keys_are_listed_and_revoked_by_their_tenant_only(db: Connection) -> None:
    tenant, other = await new_tenant(db), await new_tenant(db)
    minted = await new_key(db, tenant)
    assert await keys.list_page(db, other, after=BEGINNING, limit=10) == []
    with pytest.raises(NotFound):
        await keys.revoke(db, other, minted.id)
    (record,) = await keys.list_page(db, tenant, after=BEGINNING, limit=10)
    assert record.id == minted.id
    assert record.revoked_at is None


async def test_revoking_twice_keeps_the_first_time(db: Connection) -> None:
    tenant = await new_tenant(db)
    minted = await new_key(db, tenant)
    first = await keys.revoke(db, tenant, minted.id)
    assert first.revoked_at is not None
    assert await keys.revoke(db, tenant, minted.id) == first


async def test_finding_a_key_reads_one_index_entry(db: Connection) -> None:
    tenant = await new_tenant(db)
    for _ in range(50):
        await new_key(db, tenant)
    await db.execute("SET enable_seqscan = off")
    plan = json.loads(await db.fetchval(f"EXPLAIN (FORMAT JSON) {keys.FIND_KEY}", "a" * 16))[0]["Plan"]
    assert (plan["Node Type"], plan["Index Name"]) == ("Index Scan", "api_key_pkey")
