"""The probes and the metrics."""

from __future__ import annotations

from datetime import timedelta

import httpx
import pytest

from app.api.app import create_probes
from app.api.deps import ApiDeps
from app.loops import LoopHealth
from app.store import migrations
from app.store.pool import Pool
from tests.api.conftest import HOST, Switches, assert_problem


async def test_ready_when_everything_is_well(stranger: httpx.AsyncClient, health: LoopHealth) -> None:
    health.succeeded("planner")
    response = await stranger.get("/readyz")
    assert response.status_code == 200
    checks = {"database": "ok", "planner": "ok", "drain": "ok"}
    assert response.json() == {"status": "ok", "version": "9.9.9", "checks": checks}
    assert (await stranger.head("/readyz")).status_code == 200


async def test_not_ready_while_draining(
    stranger: httpx.AsyncClient, health: LoopHealth, switches: Switches
) -> None:
    health.succeeded("planner")
    switches.is_draining = True
    response = await stranger.get("/readyz")
    assert (response.status_code, response.json()["checks"]["drain"]) == (503, "has begun")
    assert (await stranger.get("/livez")).status_code == 200


async def test_not_ready_before_the_first_plan_or_long_after_the_last(
    stranger: httpx.AsyncClient, health: LoopHealth, switches: Switches
) -> None:
    assert (await stranger.get("/readyz")).json()["checks"]["planner"] == "has not planned yet"
    health.succeeded("planner")
    switches.now += 31
    response = await stranger.get("/readyz")
    assert (response.status_code, response.json()["checks"]["planner"]) == (503, "last succeeded 31 s ago")


async def test_a_lost_database_is_not_ready_but_alive(
    stranger: httpx.AsyncClient, health: LoopHealth, pool: Pool
) -> None:
    health.succeeded("planner")
    await pool.close()
    response = await stranger.get("/readyz")
    assert (response.status_code, response.json()["checks"]["database"]) == (
        503,
        "does not answer within 2 s",
    )
    assert (await stranger.get("/livez")).status_code == 200


async def test_an_exhausted_pool_is_not_ready_in_bounded_time(
    stranger: httpx.AsyncClient, health: LoopHealth, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.health.DATABASE_DEADLINE", timedelta(milliseconds=50))
    health.succeeded("planner")
    held = [await pool.acquire() for _ in range(pool.get_max_size())]
    response = await stranger.get("/readyz")
    assert response.status_code == 503
    for conn in held:
        await pool.release(conn)
    monkeypatch.setattr("app.api.health.DATABASE_DEADLINE", timedelta(seconds=10))
    assert (await stranger.get("/readyz")).status_code == 200


async def test_a_newer_schema_leaves_a_running_replica_ready(
    stranger: httpx.AsyncClient, health: LoopHealth, pool: Pool
) -> None:
    health.succeeded("planner")
    await pool.execute("INSERT INTO schema_migration VALUES (9999, '9999_later.sql', sha256('later'), now())")
    assert (await stranger.get("/readyz")).status_code == 200


async def test_an_older_schema_is_not_ready(
    stranger: httpx.AsyncClient, health: LoopHealth, pool: Pool
) -> None:
    health.succeeded("planner")
    last = migrations.read_history(migrations.folder())[-1]
    await pool.execute("DELETE FROM schema_migration WHERE version = $1", last.version)
    response = await stranger.get("/readyz")
    assert response.status_code == 503
    assert "carillon migrate" in response.json()["checks"]["database"]


async def test_a_hung_loop_is_not_alive(
    stranger: httpx.AsyncClient, health: LoopHealth, switches: Switches
) -> None:
    health.expect("reaper", timedelta(seconds=10))
    assert (await stranger.get("/livez")).status_code == 200
    switches.now += 11
    response = await stranger.get("/livez")
    assert (response.status_code, response.json()["checks"]) == (503, {"loop reaper": "hangs"})


async def test_metrics_need_no_key_and_name_no_path(stranger: httpx.AsyncClient) -> None:
    for method, path in (("GET", "/v1/schedules"), ("BREW", "/nonsense-canary"), ("BREW", "/v1/schedules")):
        await stranger.request(method, path)
    response = await stranger.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'scheduler_api_requests_total{method="GET",status="401"}' in response.text
    assert "nonsense-canary" not in response.text
    assert "BREW" not in response.text


async def test_a_replica_without_the_api_still_answers_its_probes(deps: ApiDeps) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_probes(deps)), base_url=HOST) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        for path in ("/v1/schedules", "/v1/tenants", "/openapi.json", "/docs"):
            assert_problem(await client.get(path), 404, "not-found")
