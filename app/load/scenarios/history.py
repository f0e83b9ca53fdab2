"""`history`: how long a page of the history and one run take over the API, when there are many."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

from app.domain.ids import RunId, ScheduleId, TenantId, run_id
from app.errors import CarillonError
from app.load.costs import Costs, Meter
from app.load.lateness import Lateness
from app.load.place import Place
from app.load.progress import Show
from app.load.round import whole_millisecond
from app.load.seeds import tenant_ids
from app.load.summary import Figures
from app.store import load_measure, load_seed, partitions
from app.store.load_seed import SeededRun
from app.store.partitions import Month
from app.store.pool import Connection

OVER = timedelta(days=60)
"""The history reaches so far back."""
CHUNK = 200_000
SCHEDULES_PER_TENANT = 20
FAILED_EVERY = 50
TOOK = timedelta(milliseconds=25)
READERS = 20
"""Tenants whose history is read."""
PAGE = 50
PAGES_DEEP = 3
HTTP_OK = 200
HTTP_LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class History:
    """`rows` runs of `tenants`, each with its attempt; `requests` pages and as many single runs are asked for."""

    rows: int
    tenants: int
    requests: int

    def runs(self, until: datetime) -> Iterator[SeededRun]:
        """All runs, oldest first, evenly spread; each tenant has SCHEDULES_PER_TENANT schedules."""
        owners = [(tenant, _schedules_of(tenant)) for tenant in tenant_ids(self.tenants)]
        apart = OVER / self.rows
        for number in range(self.rows):
            at = until - OVER + number * apart
            at = at.replace(microsecond=at.microsecond // 1000 * 1000)
            tenant, schedules = owners[number % self.tenants]
            schedule = schedules[number // self.tenants % SCHEDULES_PER_TENANT]
            yield SeededRun(run_id(schedule, at), at, tenant, schedule)


@dataclass(slots=True)
class Times:
    """Seconds that answers took, by what was asked for."""

    page: list[float] = field(default_factory=list)
    filtered_page: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)


async def measure(place: Place, history: History, show: Show) -> Figures:
    """Fill, then read. Raises CarillonError when it cannot be carried out."""
    admin_key = secrets.token_urlsafe(32)
    async with place.connection() as conn:
        await load_seed.clear(conn)
        now = whole_millisecond(await load_measure.clock(conn))
        samples = await _fill(place, conn, history, now, show)
        api = place.launch_replica("api-1", "api", api_admin_key=admin_key)
        try:
            await place.ready([api])
            assert api.url is not None
            url = api.url
            show.step(f"reading {history.requests:,} pages and {history.requests:,} runs")
            keys = await asyncio.to_thread(_keys, url, admin_key, list(samples))
            meter = await Meter.read(conn, place.measured([api]))
            times = await asyncio.to_thread(_read, url, keys, samples, history.requests)
            costs = await meter.costs(conn)
        finally:
            place.stop([api.child])
    return _figures(history, times, costs)


async def _fill(
    place: Place, conn: Connection, history: History, now: datetime, show: Show
) -> dict[TenantId, list[RunId]]:
    """Copy everything; some runs of the tenants that will read."""
    month = Month.of(now - OVER)
    while month <= Month.of(now):
        await partitions.ensure_month(conn, month)
        month = month.plus(1)
    await load_seed.copy_tenants(conn, tenant_ids(history.tenants), at=now)
    samples: dict[TenantId, list[RunId]] = {tenant: [] for tenant in tenant_ids(history.tenants)[:READERS]}
    show.step(f"filling the history with {history.rows:,} runs")
    chunk: list[SeededRun] = []
    done = 0
    with show.bar("runs", history.rows) as advance:
        for one in history.runs(now):
            chunk.append(one)
            if one.tenant_id in samples:
                samples[one.tenant_id].append(one.id)
            if len(chunk) == CHUNK:
                await _copy(conn, chunk)
                done += len(chunk)
                chunk.clear()
                advance(done)
        await _copy(conn, chunk)
    show.step("vacuuming")
    await load_seed.vacuum_history(conn)
    if place.postgres_pid is not None:
        await load_seed.checkpoint(conn)
    return samples


async def _copy(conn: Connection, runs: Sequence[SeededRun]) -> None:
    await load_seed.copy_history(conn, runs, failed=lambda number: number % FAILED_EVERY == 0, took=TOOK)


def _schedules_of(tenant: TenantId) -> list[ScheduleId]:
    rng = random.Random(tenant.int)
    return [ScheduleId(UUID(int=rng.getrandbits(128), version=4)) for _ in range(SCHEDULES_PER_TENANT)]


def _keys(url: str, admin_key: str, tenants: Sequence[TenantId]) -> dict[TenantId, str]:
    """A key that may read for each of the tenants, by the API's own way."""
    connection = _connect(url)
    body = json.dumps({"name": "load", "scopes": ["read"]})
    made: dict[TenantId, str] = {}
    for tenant in tenants:
        answer = _ask(connection, "POST", f"/v1/tenants/{tenant}/keys", admin_key, body)
        made[tenant] = json.loads(answer)["key"]
    connection.close()
    return made


def _read(url: str, keys: dict[TenantId, str], samples: dict[TenantId, list[RunId]], requests: int) -> Times:
    """Ask one after the other over one connection: pages from the newest on and into the past, pages of one schedule,
    and single runs from anywhere in the history."""
    times = Times()
    rng = random.Random(1)
    tenants = [tenant for tenant, runs in samples.items() if runs]
    connection = _connect(url)
    for warm_up in (True, False):
        for _ in range(PAGES_DEEP if warm_up else requests):
            tenant = rng.choice(tenants)
            key = keys[tenant]
            _page_walk(connection, key, times)
            schedule = rng.choice(_schedules_of(tenant))
            path = f"/v1/runs?limit={PAGE}&schedule_id={schedule}"
            times.filtered_page.append(_timed(connection, path, key)[0])
            run = rng.choice(samples[tenant])
            took, answer = _timed(connection, f"/v1/runs/{run}", key)
            if answer["id"] != str(run) or len(answer["attempts"]) != 1:
                raise CarillonError(f"run {run} was not read as it was written")
            times.run.append(took)
        if warm_up:
            times = Times()
    connection.close()
    return times


def _page_walk(connection: http.client.HTTPConnection, key: str, times: Times) -> None:
    """The newest page and those behind it."""
    path = f"/v1/runs?limit={PAGE}"
    cursor: str | None = ""
    for _ in range(PAGES_DEEP):
        took, answer = _timed(connection, f"{path}&cursor={quote(cursor)}" if cursor else path, key)
        times.page.append(took)
        cursor = answer["next_cursor"]
        if cursor is None:
            return


def _timed(connection: http.client.HTTPConnection, path: str, key: str) -> tuple[float, Any]:
    begun = time.perf_counter()
    answer = _ask(connection, "GET", path, key)
    return time.perf_counter() - begun, json.loads(answer)


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, key: str, body: str | None = None
) -> bytes:
    headers = {"Authorization": f"Bearer {key}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    text = answer.read()
    if not HTTP_OK <= answer.status < HTTP_OK + 100:
        raise CarillonError(f"{method} {path} answered {answer.status}: {text[:300]!r}")
    return text


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HTTP_LIMIT)


def _figures(history: History, times: Times, costs: Costs) -> Figures:
    answers = len(times.page) + len(times.filtered_page) + len(times.run)
    told = {name: _ms(getattr(times, name)) for name in ("page", "filtered_page", "run")}
    return Figures(
        scenario="history",
        tenants=history.tenants,
        schedules=history.tenants * SCHEDULES_PER_TENANT,
        others_cpu_share=costs.others_share,
        stolen_cpu_share=costs.stolen_share,
        own={
            "page_p99_ms": told["page"]["p99"],
            "run_p99_ms": told["run"]["p99"],
            "rows": history.rows,
            "page_ms": told["page"],
            "schedule_page_ms": told["filtered_page"],
            "run_ms": told["run"],
            "pages": len(times.page),
            "runs_read": len(times.run),
            "cpu_us_per_answer": {part: seconds * 1e6 / answers for part, seconds in costs.cpu.parts.items()},
        },
    )


def _ms(seconds: Sequence[float]) -> dict[str, float | None]:
    return Lateness(int(one * 1e9) for one in seconds).percentiles()
