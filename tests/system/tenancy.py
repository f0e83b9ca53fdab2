"""A tenant of a running replica, used over the real API as a person would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.eventually import eventually
from tests.system.replicas import ADMIN_KEY, Replica

Json = dict[str, Any]


class Tenant:
    """One tenant with a key of its own."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """The answer's JSON, {} when it has none. Raises for an error status."""
        answer = await self.client.request(method, path, json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return dict(answer.json()) if answer.content else {}

    async def create(self, name: str, recurrence: Json, url: str, **more: object) -> str:
        """A new schedule's id."""
        body = {"name": name, "recurrence": recurrence, "target": {"method": "POST", "url": url}, **more}
        return str((await self.call("POST", "/v1/schedules", body))["id"])

    async def run_now(self, schedule: str) -> str:
        """The id of a person's own run."""
        return str((await self.call("POST", f"/v1/schedules/{schedule}/run"))["id"])

    async def runs(self, schedule: str) -> list[Json]:
        """The schedule's runs, newest first."""
        return list((await self.call("GET", f"/v1/runs?schedule_id={schedule}&limit=200"))["runs"])

    async def run(self, run: str) -> Json:
        """One run with its attempts."""
        return await self.call("GET", f"/v1/runs/{run}")

    async def ended(self, run: str) -> Json:
        """Wait for the run's end; the run with its attempts."""

        async def probe() -> Json | None:
            found = await self.run(run)
            return found if found["finished_at"] is not None else None

        found = await eventually(probe)
        assert found is not None
        return found


@asynccontextmanager
async def new_tenant(replica: Replica, name: str = "somebody") -> AsyncIterator[Tenant]:
    """Make a tenant and a key over the administration's API."""
    async with httpx.AsyncClient(
        base_url=replica.url,
        trust_env=False,
        verify=False,
        timeout=30,
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
    ) as client:
        tenant = Tenant(client)
        made = await tenant.call("POST", "/v1/tenants", {"name": name})
        key = await tenant.call(
            "POST", f"/v1/tenants/{made['id']}/keys", {"name": "k", "scopes": ["read", "write"]}
        )
        client.headers["authorization"] = f"Bearer {key['key']}"
        yield tenant
