"""The API over a real database, reached without a socket."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from app.api.app import create_app
from app.api.deps import ApiDeps
from app.domain import api_key
from app.domain.address import AddressPolicy
from app.domain.api_key import Scope
from app.domain.ids import TenantId
from app.domain.plan import Limits
from app.domain.run import RunRef
from app.loops import LoopHealth
from app.settings import ApiSettings
from app.store import keys, tenants
from app.store.pool import Pool

ADMIN_KEY = "administrators-only-canary-5f1e"
HOST = "http://carillon.test"


@dataclass(slots=True)
class Switches:
    """What a test may turn on the running application."""

    is_draining: bool = False
    now: float = 0.0
    announced: list[RunRef] = field(default_factory=list)

    async def announce(self, runs: Sequence[RunRef]) -> None:
        self.announced.extend(runs)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """One tenant and a client with a key that may do everything in it."""

    id: TenantId
    client: httpx.AsyncClient
    key: str = field(repr=False)


@pytest.fixture
def switches() -> Switches:
    return Switches()


@pytest.fixture
def health(switches: Switches) -> LoopHealth:
    return LoopHealth(clock=lambda: switches.now)


@pytest.fixture
def deps(pool: Pool, switches: Switches, health: LoopHealth) -> ApiDeps:
    return ApiDeps(
        pool=pool,
        settings=ApiSettings(admin_key=SecretStr(ADMIN_KEY), max_body_bytes=65_536),
        health=health,
        address_policy=AddressPolicy(),
        announce=switches.announce,
        is_draining=lambda: switches.is_draining,
        planner_patience=timedelta(seconds=30),
        lookahead=timedelta(seconds=5),
        limits=Limits(),
        version="9.9.9",
    )


@pytest.fixture
def application(deps: ApiDeps) -> FastAPI:
    return create_app(deps)


@pytest.fixture
async def connect_as(application: FastAPI) -> AsyncIterator[Callable[[str | None], httpx.AsyncClient]]:
    """Makes clients that present the given key (None: none at all)."""
    made: list[httpx.AsyncClient] = []

    def client(key: str | None) -> httpx.AsyncClient:
        headers: Mapping[str, str] = {} if key is None else {"Authorization": f"Bearer {key}"}
        made.append(
            httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url=HOST, headers=headers)
        )
        return made[-1]

    yield client
    for one in made:
        await one.aclose()


ConnectAs = Callable[[str | None], httpx.AsyncClient]


@pytest.fixture
def stranger(connect_as: ConnectAs) -> httpx.AsyncClient:
    return connect_as(None)


@pytest.fixture
def admin(connect_as: ConnectAs) -> httpx.AsyncClient:
    return connect_as(ADMIN_KEY)


@pytest.fixture
async def tenant(pool: Pool, connect_as: ConnectAs) -> Tenancy:
    return await new_tenancy(pool, connect_as)


@pytest.fixture
async def other_tenant(pool: Pool, connect_as: ConnectAs) -> Tenancy:
    return await new_tenancy(pool, connect_as)


async def new_tenancy(pool: Pool, connect_as: ConnectAs, *scopes: Scope) -> Tenancy:
    """A tenant with one key of these scopes (all when none is named)."""
    tenant = TenantId(uuid4())
    async with pool.acquire() as conn:
        await tenants.insert(conn, tenant, name="a tenant")
    key = await new_key(pool, tenant, *scopes)
    return Tenancy(tenant, connect_as(key), key)


async def new_key(pool: Pool, tenant: TenantId, *scopes: Scope) -> str:
    minted = api_key.mint(secrets.token_bytes)
    async with pool.acquire() as conn:
        await keys.insert(conn, tenant, minted, name="a key", scopes=scopes or tuple(Scope), expires_at=None)
    return minted.text


def schedule_body(**changes: Any) -> dict[str, Any]:
    """A body that POST /v1/schedules takes, with the given fields instead."""
    return {
        "name": "nightly report",
        "recurrence": {"kind": "cron", "cron": "*/5 * * * *", "timezone": "Europe/Berlin"},
        "target": {
            "method": "POST",
            "url": "https://example.com/hook",
            "headers": {"X-Foo": "bar"},
            "body": "{}",
        },
        **changes,
    }


async def created(tenancy: Tenancy, **changes: Any) -> dict[str, Any]:
    """A schedule of the tenant, made through the API."""
    response = await tenancy.client.post("/v1/schedules", json=schedule_body(**changes))
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


def assert_problem(response: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    """The response is this kind of problem; returns its body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"/problems/{slug}"
    assert body["status"] == status
    assert body["request_id"] == response.headers["x-request-id"]
    return body
