"""Who may do what: keys, scopes, the administrator, and the wall between tenants, over the whole route table."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from app.api.app import blank_app
from app.api.auth import ADMIN_KEY_NEEDED, TENANT_KEY_NEEDED, AdminRoute, ReadRoute, TenantRoute, WriteRoute
from app.domain.api_key import Scope
from app.domain.ids import ScheduleId
from app.store.pool import Connection, Pool
from tests.api.conftest import ADMIN_KEY, ConnectAs, Tenancy, assert_problem, created, new_key, schedule_body
from tests.factories_history import add_runs

OPEN_PATHS = {"/livez", "/readyz", "/metrics", "/docs", "/openapi.json", "/problems", "/problems/{slug}"}


def routes(app: FastAPI) -> Iterator[tuple[type, str, str]]:
    """(route class, method, path) of everything the application answers."""
    for context in iter_route_contexts(app.routes):
        for method in sorted(context.methods or ()):
            yield type(context.original_route), method, str(context.path)


TABLE = list(routes(blank_app()))
TENANT_TABLE = [(method, path) for kind, method, path in TABLE if issubclass(kind, TenantRoute)]
ADMIN_TABLE = [(method, path) for kind, method, path in TABLE if issubclass(kind, AdminRoute)]


def test_every_route_is_a_tenants_an_administrators_or_knowingly_open() -> None:
    for kind, _, path in TABLE:
        assert issubclass(kind, (ReadRoute, WriteRoute, AdminRoute)) != (path in OPEN_PATHS), path
    assert len(TENANT_TABLE) >= 14
    assert len(ADMIN_TABLE) >= 6


def test_routes_that_change_something_need_the_write_scope() -> None:
    for kind, method, path in TABLE:
        if issubclass(kind, TenantRoute):
            wanted = ReadRoute if method == "GET" or path == "/v1/cron/preview" else WriteRoute
            assert issubclass(kind, wanted), (method, path)


def filled(path: str, value: object) -> str:
    return re.sub(r"\{\w+\}", str(value), path)


@pytest.mark.parametrize(("method", "path"), TENANT_TABLE + ADMIN_TABLE)
async def test_without_a_key_every_route_answers_the_same_401_and_reads_no_body(
    stranger: httpx.AsyncClient, method: str, path: str
) -> None:
    response = await stranger.request(method, filled(path, uuid4()), content=b"{" * 100_000)
    body = assert_problem(response, 401, "unauthenticated")
    assert response.headers["www-authenticate"] == 'Bearer realm="carillon"'
    is_admins = path.startswith("/v1/tenants")
    assert body["detail"] == (ADMIN_KEY_NEEDED if is_admins else TENANT_KEY_NEEDED)


async def bad_keys(pool: Pool, tenant: Tenancy) -> dict[str, str]:
    """A key for every way of being wrong."""
    kinds = {kind: await new_key(pool, tenant.id) for kind in ("expired", "revoked", "cut", "forged")}
    ids = {kind: key.split("_")[1] for kind, key in kinds.items()}
    await pool.execute("UPDATE api_key SET expires_at = now() - interval '1 s' WHERE id = $1", ids["expired"])
    await pool.execute("UPDATE api_key SET revoked_at = now() WHERE id = $1", ids["revoked"])
    last = "A" if kinds["forged"][-1] != "A" else "B"
    return {
        **kinds,
        "cut": kinds["cut"][:-1],
        "forged": kinds["forged"][:-1] + last,
        "unknown": "ck_" + "a" * 16 + "_" + "A" * 43,
        "empty": "",
        "admin": ADMIN_KEY,
        "long": "ck_" + "a" * 100_000,
        "nul": "ck_\x7f",
    }


async def test_every_bad_key_gets_the_same_answer(
    pool: Pool, tenant: Tenancy, stranger: httpx.AsyncClient
) -> None:
    answers = set()
    for key in (await bad_keys(pool, tenant)).values():
        response = await stranger.get("/v1/schedules", headers={"Authorization": f"Bearer {key}"})
        body = assert_problem(response, 401, "unauthenticated")
        answers.add(tuple(sorted((name, str(value)) for name, value in body.items() if name != "request_id")))
    assert len(answers) == 1


@pytest.mark.parametrize(
    "header",
    [
        b"Bearer \xff\xfe",
        "Bearer schlüssel".encode(),
        b"Basic abc",
        b"Bearer",
        b"bearer",
        b"",
        b"\xf0\x9f\x94\x91",
    ],
)
@pytest.mark.parametrize("path", ["/v1/schedules", "/v1/tenants"])
async def test_an_odd_authorization_header_is_401(
    stranger: httpx.AsyncClient, header: bytes, path: str
) -> None:
    request = stranger.build_request("GET", path)
    request.headers = httpx.Headers([(b"host", b"carillon.test"), (b"authorization", header)])
    assert_problem(await stranger.send(request), 401, "unauthenticated")


async def test_two_authorization_headers_are_401(tenant: Tenancy) -> None:
    request = tenant.client.build_request("GET", "/v1/schedules")
    request.headers = httpx.Headers(
        [("host", "carillon.test"), ("authorization", f"Bearer {tenant.key}"), ("authorization", "Bearer x")]
    )
    assert_problem(await tenant.client.send(request), 401, "unauthenticated")


async def test_a_revoked_key_ends_with_the_next_request(tenant: Tenancy, admin: httpx.AsyncClient) -> None:
    assert (await tenant.client.get("/v1/schedules")).status_code == 200
    key_id = tenant.key.split("_")[1]
    revoked = await admin.delete(f"/v1/tenants/{tenant.id}/keys/{key_id}")
    assert revoked.status_code == 200
    assert_problem(await tenant.client.get("/v1/schedules"), 401, "unauthenticated")


@pytest.mark.parametrize(("method", "path"), ADMIN_TABLE)
async def test_a_tenants_key_opens_no_administration(tenant: Tenancy, method: str, path: str) -> None:
    response = await tenant.client.request(method, filled(path, tenant.id), json={"name": "mine"})
    assert_problem(response, 401, "unauthenticated")


@pytest.mark.parametrize(("method", "path"), TENANT_TABLE)
async def test_the_administrators_key_opens_no_tenants_route(
    admin: httpx.AsyncClient, method: str, path: str
) -> None:
    assert_problem(await admin.request(method, filled(path, uuid4())), 401, "unauthenticated")


async def test_scopes_are_enforced_on_every_route(pool: Pool, tenant: Tenancy, connect_as: ConnectAs) -> None:
    reader = connect_as(await new_key(pool, tenant.id, Scope.READ))
    writer = connect_as(await new_key(pool, tenant.id, Scope.WRITE))
    for kind, method, path in TABLE:
        if not issubclass(kind, TenantRoute):
            continue
        allowed, refused = (reader, writer) if kind is ReadRoute else (writer, reader)
        assert_problem(await refused.request(method, filled(path, uuid4())), 403, "forbidden")
        assert (await allowed.request(method, filled(path, uuid4()))).status_code not in (401, 403)


def a_body_for(method: str, path: str) -> dict[str, Any] | None:
    if method == "PATCH":
        return {"name": "stolen"}
    return {"reason": "stolen"} if path.endswith("/pause") else None


@pytest.mark.parametrize(("method", "path"), [row for row in TENANT_TABLE if "{" in row[1]])
async def test_a_foreign_id_answers_like_an_unknown_one_and_changes_nothing(
    tenant: Tenancy, other_tenant: Tenancy, db: Connection, method: str, path: str
) -> None:
    theirs = await created(other_tenant)
    at = datetime(2026, 3, 31, 12, tzinfo=UTC)
    (run,) = await add_runs(db, other_tenant.id, [(ScheduleId(UUID(theirs["id"])), at)], status="pending")
    before = await snapshot(db)

    foreign_id = theirs["id"] if "schedule_id" in path else run
    answers = []
    for one in (foreign_id, uuid4(), "not-a-uuid", "%00", "a" * 5_000):
        response = await tenant.client.request(method, filled(path, one), json=a_body_for(method, path))
        body = assert_problem(response, 404, "not-found")
        answers.append(
            {name: value for name, value in body.items() if name not in ("request_id", "instance")}
        )
    assert all(answer == answers[0] for answer in answers)
    assert await snapshot(db) == before


async def snapshot(db: Connection) -> list[Any]:
    """Everything that tenants own."""
    return [
        await db.fetch("SELECT * FROM schedule ORDER BY id"),
        await db.fetch("SELECT * FROM job_run ORDER BY id"),
        await db.fetch("SELECT * FROM disposition ORDER BY schedule_id, first_at"),
    ]


async def test_lists_hold_only_the_callers_rows(
    tenant: Tenancy, other_tenant: Tenancy, db: Connection
) -> None:
    theirs = await created(other_tenant)
    at = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    await add_runs(db, other_tenant.id, [(ScheduleId(UUID(theirs["id"])), at)])

    assert (await tenant.client.get("/v1/schedules")).json()["schedules"] == []
    assert (await tenant.client.get("/v1/runs")).json()["runs"] == []
    assert (await tenant.client.get(f"/v1/runs?schedule_id={theirs['id']}")).json()["runs"] == []
    assert len((await other_tenant.client.get("/v1/runs")).json()["runs"]) == 1


async def test_a_tenant_cannot_be_named_by_the_caller(tenant: Tenancy, other_tenant: Tenancy) -> None:
    named = {"tenant_id": str(other_tenant.id)}
    for path in ("/v1/schedules", "/v1/runs"):
        assert_problem(await tenant.client.get(path, params=named), 422, "invalid-input")
    body = schedule_body(tenant_id=str(other_tenant.id))
    assert_problem(await tenant.client.post("/v1/schedules", json=body), 422, "invalid-input")
    header = {"X-Tenant-Id": str(other_tenant.id)}
    made = await tenant.client.post("/v1/schedules", json=schedule_body(), headers=header)
    assert made.status_code == 201
    assert (await other_tenant.client.get("/v1/schedules")).json()["schedules"] == []


async def test_a_cursor_of_another_tenant_or_list_is_refused(tenant: Tenancy, other_tenant: Tenancy) -> None:
    for tenancy in (tenant, other_tenant):
        for _ in range(2):
            await created(tenancy)
    theirs = (await other_tenant.client.get("/v1/schedules?limit=1")).json()["next_cursor"]
    mine = (await tenant.client.get("/v1/schedules?limit=1")).json()["next_cursor"]

    for path, cursor in (
        ("/v1/schedules", theirs),
        ("/v1/schedules?status=active", mine),
        ("/v1/runs", mine),
        ("/v1/schedules", mine[:-1]),
        ("/v1/schedules", mine + "A"),
        ("/v1/schedules", "%ff"),
        ("/v1/schedules", "A" * 99),
    ):
        joint = "&" if "?" in path else "?"
        body = assert_problem(await tenant.client.get(f"{path}{joint}cursor={cursor}"), 422, "invalid-input")
        assert body["errors"][0]["parameter"] == "cursor"
    assert (await tenant.client.get(f"/v1/schedules?cursor={mine}")).status_code == 200


async def test_no_key_reaches_a_log_or_an_answer(
    pool: Pool,
    tenant: Tenancy,
    stranger: httpx.AsyncClient,
    admin: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = [tenant.key, ADMIN_KEY, *(await bad_keys(pool, tenant)).values()]
    answers = []
    for key in keys:
        headers = {"Authorization": f"Bearer {key}"}
        answers.append(await stranger.get("/v1/schedules", headers=headers))
        answers.append(await stranger.post("/v1/tenants", headers=headers, json={"name": 1}))
        answers.append(await stranger.post("/v1/schedules", headers=headers, content=b"{"))
    logged = "".join(str(vars(record)) for record in caplog.records)
    answered = "".join(answer.text + str(answer.headers) for answer in answers)
    for key in filter(None, keys):
        secret = key.split("_", 2)[-1]
        assert secret not in logged
        assert secret not in answered
    assert tenant.key.split("_")[1] in logged  # the key's id, so that its owner can be told
