"""Tenants and keys through the administrator's routes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import httpx
import pytest

from app.api.deps import ApiDeps
from app.settings import ApiSettings
from app.store.pool import Pool
from tests.api.conftest import ADMIN_KEY, ConnectAs, assert_problem


async def new_tenant(admin: httpx.AsyncClient, name: str = "acme") -> str:
    response = await admin.post("/v1/tenants", json={"name": name})
    assert response.status_code == 201, response.text
    made: str = response.json()["id"]
    return made


async def test_a_tenant_and_a_key_made_here_open_its_routes(
    admin: httpx.AsyncClient, connect_as: ConnectAs
) -> None:
    made = await admin.post("/v1/tenants", json={"name": "acme"})
    assert (await admin.get(made.headers["location"])).json() == made.json()
    keys = f"{made.headers['location']}/keys"
    key = await admin.post(keys, json={"name": "backend", "scopes": ["read"]})

    assert key.status_code == 201, key.text
    assert key.headers["cache-control"] == "no-store"
    client = connect_as(key.json()["key"])
    assert (await client.get("/v1/schedules")).status_code == 200
    assert_problem(await client.post("/v1/schedules", json={}), 403, "forbidden")


async def test_a_key_is_shown_once_and_kept_as_a_digest(admin: httpx.AsyncClient, pool: Pool) -> None:
    tenant = await new_tenant(admin)
    made = (await admin.post(f"/v1/tenants/{tenant}/keys", json={"name": "backend"})).json()
    assert made["scopes"] == ["read", "write"]
    secret = made["key"].split("_", 2)[2]
    listed = await admin.get(f"/v1/tenants/{tenant}/keys")
    assert listed.json()["keys"] == [{name: value for name, value in made.items() if name != "key"}]
    assert secret not in listed.text
    stored = await pool.fetchval("SELECT row(api_key.*)::text FROM api_key WHERE id = $1", made["id"])
    assert secret not in stored


async def test_a_key_ends_at_its_time(admin: httpx.AsyncClient, connect_as: ConnectAs, pool: Pool) -> None:
    tenant = await new_tenant(admin)
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    body = {"name": "short", "expires_at": soon}
    made = (await admin.post(f"/v1/tenants/{tenant}/keys", json=body)).json()
    client = connect_as(made["key"])
    assert (await client.get("/v1/schedules")).status_code == 200
    await pool.execute("UPDATE api_key SET expires_at = now() WHERE id = $1", made["id"])
    assert_problem(await client.get("/v1/schedules"), 401, "unauthenticated")


async def test_revoking_is_for_good_and_may_be_repeated(admin: httpx.AsyncClient) -> None:
    tenant = await new_tenant(admin)
    made = (await admin.post(f"/v1/tenants/{tenant}/keys", json={"name": "backend"})).json()
    path = f"/v1/tenants/{tenant}/keys/{made['id']}"
    first = (await admin.delete(path)).json()
    assert first["revoked_at"] is not None
    assert (await admin.delete(path)).json() == first


async def test_a_key_is_revoked_through_its_own_tenant_only(admin: httpx.AsyncClient) -> None:
    tenant, other = await new_tenant(admin), await new_tenant(admin)
    made = (await admin.post(f"/v1/tenants/{tenant}/keys", json={"name": "backend"})).json()
    assert_problem(await admin.delete(f"/v1/tenants/{other}/keys/{made['id']}"), 404, "not-found")
    (kept,) = (await admin.get(f"/v1/tenants/{tenant}/keys")).json()["keys"]
    assert kept["revoked_at"] is None


async def test_what_does_not_exist_is_not_found(admin: httpx.AsyncClient) -> None:
    tenant = await new_tenant(admin)
    for method, path in (
        ("GET", f"/v1/tenants/{uuid4()}"),
        ("GET", "/v1/tenants/acme"),
        ("GET", f"/v1/tenants/{uuid4()}/keys"),
        ("DELETE", f"/v1/tenants/{tenant}/keys/aaaaaaaaaaaaaaaa"),
        ("DELETE", f"/v1/tenants/{tenant}/keys/%00"),
    ):
        assert_problem(await admin.request(method, path), 404, "not-found")
    assert_problem(await admin.post(f"/v1/tenants/{uuid4()}/keys", json={"name": "a"}), 404, "not-found")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"name": ""}, "/name"),
        ({"name": " "}, "/name"),
        ({"name": 7}, "/name"),
        ({"name": "a" * 201}, "/name"),
        ({"name": "a\0b"}, "/name"),
        ({"scopes": []}, "/scopes"),
        ({"scopes": ["admin"]}, "/scopes/0"),
        ({"scopes": "read"}, "/scopes"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "/expires_at"),
        ({"expires_at": "tomorrow"}, "/expires_at"),
        ({"secret": "mine"}, "/secret"),
    ],
)
async def test_a_faulty_key_is_refused_by_field(
    admin: httpx.AsyncClient, change: dict[str, object], pointer: str
) -> None:
    tenant = await new_tenant(admin)
    response = await admin.post(f"/v1/tenants/{tenant}/keys", json={"name": "backend", **change})
    errors = assert_problem(response, 422, "invalid-input")["errors"]
    assert [error["pointer"] for error in errors] == [pointer]
    assert (await admin.get(f"/v1/tenants/{tenant}/keys")).json()["keys"] == []


async def test_walks_over_tenants_and_keys_see_each_once(admin: httpx.AsyncClient, pool: Pool) -> None:
    tenants = sorted([await new_tenant(admin) for _ in range(7)])
    keys = [
        (await admin.post(f"/v1/tenants/{tenants[0]}/keys", json={"name": str(n)})).json()["id"]
        for n in range(7)
    ]
    await pool.execute("UPDATE api_key SET created_at = '2026-01-01T00:00:00.123456Z'")
    assert await walk(admin, "/v1/tenants?limit=3", "tenants") == tenants
    assert await walk(admin, f"/v1/tenants/{tenants[0]}/keys?limit=3", "keys") == sorted(keys)


async def walk(client: httpx.AsyncClient, path: str, name: str) -> list[str]:
    seen: list[str] = []
    while path:
        response = await client.get(path)
        seen += [one["id"] for one in response.json()[name]]
        path = response.links["next"]["url"] if "next" in response.links else ""
    return seen


async def test_without_an_administrators_key_nobody_administers(
    deps: ApiDeps, application: object, connect_as: ConnectAs
) -> None:
    object.__setattr__(deps, "settings", ApiSettings())
    for key in (ADMIN_KEY, "", None, "None"):
        assert_problem(await connect_as(key).get("/v1/tenants"), 401, "unauthenticated")
