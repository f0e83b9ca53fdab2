"""Tenants and keys on the wire."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from pydantic import Field, field_validator

from app.api.values import NEXT_CURSOR, Body, Instant, Shown, Text
from app.domain.api_key import Scope
from app.store.keys import KeyRecord
from app.store.tenants import Tenant

NAME_MAX = 200


def _checked_name(name: str) -> str:
    if not name.strip():
        raise ValueError("must not be blank")
    return name


class TenantBody(Body):
    name: Text = Field(min_length=1, max_length=NAME_MAX, description="For people; need not be unique.")

    _name = field_validator("name")(_checked_name)


class KeyBody(Body):
    name: Text = Field(min_length=1, max_length=NAME_MAX, description="For people: where the key is used.")
    scopes: frozenset[Scope] = Field(
        frozenset(Scope), min_length=1, description="What the key may do in its tenant; both by default."
    )
    expires_at: Instant | None = Field(None, description="When the key ends by itself; null: never.")

    _name = field_validator("name")(_checked_name)


class TenantShown(Shown):
    id: UUID
    name: str
    created_at: datetime


class TenantPage(Shown):
    tenants: list[TenantShown]
    next_cursor: str | None = NEXT_CURSOR


class KeyShown(Shown):
    id: str = Field(description="The part of the key that is no secret; logs name the key by it.")
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewKeyShown(KeyShown):
    key: str = Field(description="The key itself. Shown here once and never again.")


class KeyPage(Shown):
    keys: list[KeyShown]
    next_cursor: str | None = NEXT_CURSOR


def show_tenant(tenant: Tenant) -> TenantShown:
    return TenantShown(id=tenant.id, name=tenant.name, created_at=tenant.created_at)


def show_key(key: KeyRecord) -> KeyShown:
    return KeyShown(
        id=key.id,
        name=key.name,
        scopes=list(key.scopes),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )


def show_new_key(key: KeyRecord, text: str) -> NewKeyShown:
    return NewKeyShown(**show_key(key).model_dump(), key=text)
