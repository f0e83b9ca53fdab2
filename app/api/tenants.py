"""The administrator's routes: tenants and their keys."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID, uuid4

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from app.api import cursor
from app.api.auth import AdminRoute, admin_key
from app.api.cursor import Mark
from app.api.deps import deps_of
from app.api.models_tenant import (
    KeyBody,
    KeyPage,
    KeyShown,
    NewKeyShown,
    TenantBody,
    TenantPage,
    TenantShown,
    show_key,
    show_new_key,
    show_tenant,
)
from app.api.values import Paging, TenantIdInPath
from app.domain import api_key
from app.domain.ids import TenantId
from app.errors import InvalidInput
from app.store import keys, tenants
from app.store.planning import database_now
from app.store.pool import acquire

router = APIRouter(
    prefix="/v1/tenants", tags=["administration"], route_class=AdminRoute, dependencies=[Depends(admin_key)]
)


@router.post("", status_code=201)
async def create_tenant(body: TenantBody, request: Request, response: Response) -> TenantShown:
    """Create a tenant."""
    async with acquire(deps_of(request).pool) as conn:
        tenant = await tenants.insert(conn, TenantId(uuid4()), name=body.name)
    response.headers["Location"] = f"/v1/tenants/{tenant.id}"
    return show_tenant(tenant)


@router.get("")
async def list_tenants(query: Annotated[Paging, Query()], request: Request, response: Response) -> TenantPage:
    """List all tenants, in the order of their ids."""
    binding = cursor.binding_of(request, None)
    after = cursor.read(query.cursor, binding).id if query.cursor else cursor.NO_ID
    async with acquire(deps_of(request).pool) as conn:
        found = await tenants.list_page(conn, after=after, limit=query.limit + 1)
    page = found[: query.limit]
    following = cursor.write(Mark(id=page[-1].id), binding) if len(found) > query.limit else None
    cursor.link_next(request, response, following)
    return TenantPage(tenants=[show_tenant(tenant) for tenant in page], next_cursor=following)


@router.get("/{tenant_id}")
async def get_tenant(tenant_id: TenantIdInPath, request: Request) -> TenantShown:
    """Read one tenant."""
    async with acquire(deps_of(request).pool) as conn:
        return show_tenant(await tenants.get(conn, TenantId(tenant_id)))


@router.post("/{tenant_id}/keys", status_code=201)
async def create_key(
    tenant_id: TenantIdInPath, body: KeyBody, request: Request, response: Response
) -> NewKeyShown:
    """Create a key of the tenant. The answer is the only place where the key itself is ever shown."""
    minted = api_key.mint(secrets.token_bytes)
    async with acquire(deps_of(request).pool) as conn:
        if body.expires_at is not None and body.expires_at <= await database_now(conn):
            raise InvalidInput("expires_at", "must be in the future")
        record = await keys.insert(
            conn,
            TenantId(tenant_id),
            minted,
            name=body.name,
            scopes=body.scopes,
            expires_at=body.expires_at,
        )
    response.headers["Cache-Control"] = "no-store"
    return show_new_key(record, minted.text)


@router.get("/{tenant_id}/keys")
async def list_keys(
    tenant_id: TenantIdInPath, query: Annotated[Paging, Query()], request: Request, response: Response
) -> KeyPage:
    """List the tenant's keys, revoked ones included, oldest first. The keys themselves are not kept."""
    tenant = TenantId(tenant_id)
    binding = cursor.binding_of(request, tenant)
    after = _place(query.cursor, binding)
    async with acquire(deps_of(request).pool) as conn:
        await tenants.get(conn, tenant)
        found = await keys.list_page(conn, tenant, after=after, limit=query.limit + 1)
    page = found[: query.limit]
    following = None
    if len(found) > query.limit:
        last = page[-1]
        following = cursor.write(Mark(at=last.created_at, id=UUID(bytes=last.id.encode("ascii"))), binding)
    cursor.link_next(request, response, following)
    return KeyPage(keys=[show_key(key) for key in page], next_cursor=following)


@router.delete("/{tenant_id}/keys/{key_id}")
async def revoke_key(
    tenant_id: TenantIdInPath, key_id: Annotated[str, Path(pattern="^[a-z2-7]{16}$")], request: Request
) -> KeyShown:
    """Revoke a key for good: from the next request on it opens nothing. Revoking again changes nothing."""
    async with acquire(deps_of(request).pool) as conn:
        return show_key(await keys.revoke(conn, TenantId(tenant_id), key_id))


def _place(text: str | None, binding: cursor.Binding) -> tuple[datetime, str]:
    """A key's id has 16 ASCII characters: just the size of the cursor's id."""
    if text is None:
        return datetime(1, 1, 1, tzinfo=UTC), ""
    mark = cursor.read(text, binding)
    return mark.at, mark.id.bytes.decode("ascii", "replace")
