"""The application behind its real server: what only a socket can show."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from app.store import schedules
from app.store.pool import Pool
from tests.api.conftest import Tenancy, assert_problem
from tests.eventually import eventually


class Server(uvicorn.Server):
    """Leaves the signals to pytest."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture
async def port(application: FastAPI) -> AsyncIterator[int]:
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", http="h11", ws="none"
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    await eventually(lambda: server.started)
    yield bound.getsockname()[1]
    server.should_exit = True
    await serving
    bound.close()


@pytest.fixture
async def client(port: int, tenant: Tenancy) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {tenant.key}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False
    ) as opened:
        yield opened


async def exchange(port: int, request: bytes) -> bytes:
    """The whole answer to the bytes of a request, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def head(tenant: Tenancy, *lines: str) -> bytes:
    own = ("POST /v1/schedules HTTP/1.1", "Host: x", f"Authorization: Bearer {tenant.key}")
    return "\r\n".join([*own, *lines, "", ""]).encode()


async def test_an_announced_giant_is_refused_without_waiting_for_it(port: int, tenant: Tenancy) -> None:
    answer = await exchange(
        port, head(tenant, "Content-Type: application/json", "Content-Length: 99999999999")
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer


async def test_a_refused_body_leaves_the_connection_usable(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        refused = await client.post(
            "/v1/schedules", content=b"{" * 1_000, headers={"Content-Type": "text/plain"}
        )
        assert_problem(refused, 415, "unsupported-media-type")
        assert (await client.get("/v1/schedules")).status_code == 200


async def test_a_stranger_with_a_large_body_gets_401(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1/schedules"
    async with httpx.AsyncClient(trust_env=False) as client:
        assert_problem(await client.post(url, content=b" " * 60_000), 401, "unauthenticated")
        assert_problem(await client.post(url, content=b" " * 60_000), 401, "unauthenticated")


async def test_head_has_the_length_and_no_body(client: httpx.AsyncClient) -> None:
    response = await client.head("/livez")
    assert (response.status_code, response.content) == (200, b"")


async def test_a_query_ends_when_its_caller_hangs_up(
    port: int, tenant: Tenancy, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    async def slow(conn: Any, *_: object, **__: object) -> None:
        try:
            await conn.execute("SELECT pg_sleep(600)")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        except BaseException as error:  # the session's statement_timeout, if nobody cancels
            ends.append(type(error).__name__)
            raise

    async def sleeping() -> int:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"
        )
        count: int = await pool.fetchval(query)
        return count

    async def nobody_sleeps() -> bool:
        return await sleeping() == 0

    monkeypatch.setattr(schedules, "get", slow)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"GET /v1/schedules/{uuid4()} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tenant.key}\r\n\r\n"
    writer.write(request.encode())
    await eventually(sleeping)
    writer.close()
    await writer.wait_closed()
    await eventually(nobody_sleeps)
    assert ends == ["cancelled"]
