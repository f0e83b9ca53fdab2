"""The probes and the metrics. No key needed: they say nothing about any tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app import metrics
from app.api.deps import ApiDeps, deps_of
from app.errors import CarillonError, SchemaMismatch
from app.store import migrations
from app.store.pool import acquire

router = APIRouter(tags=["operations"])

DATABASE_DEADLINE = timedelta(seconds=2)
PLANNER = "planner"
OK = "ok"


@router.head("/livez", include_in_schema=False)
@router.get("/livez")
async def livez(request: Request) -> JSONResponse:
    """Alive: the event loop turns and no loop hangs. Never asks the database: a restart would not mend it."""
    hung = deps_of(request).health.hung()
    return _verdict(request, {f"loop {name}": "hangs" for name in hung})


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Ready for traffic: the database answers, its schema fits, the planner plans, and no drain has begun."""
    deps = deps_of(request)
    return _verdict(
        request,
        {
            "database": await _judge_database(deps),
            "planner": _judge_planner(deps),
            "drain": "has begun" if deps.is_draining() else OK,
        },
    )


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def read_metrics() -> Response:
    """The figures of this replica, in the text format of Prometheus."""
    body, media_type = metrics.render()
    return Response(body, media_type=media_type)


async def _judge_database(deps: ApiDeps) -> str:
    try:
        async with asyncio.timeout(DATABASE_DEADLINE.total_seconds()):
            async with acquire(deps.pool, timeout=DATABASE_DEADLINE) as conn:
                await migrations.require_contained(conn)
    except SchemaMismatch as error:
        return str(error)
    except (CarillonError, TimeoutError):
        return f"does not answer within {DATABASE_DEADLINE.total_seconds():g} s"
    return OK


def _judge_planner(deps: ApiDeps) -> str:
    if deps.planner_patience is None:
        return OK
    since = deps.health.since_success(PLANNER)
    if since is None:
        return "has not planned yet"
    if since > deps.planner_patience:
        return f"last succeeded {since.total_seconds():.0f} s ago"
    return OK


def _verdict(request: Request, checks: Mapping[str, str]) -> JSONResponse:
    is_good = all(found == OK for found in checks.values())
    status = OK if is_good else "unavailable"
    body = {"status": status, "version": deps_of(request).version, "checks": dict(checks)}
    return JSONResponse(body, 200 if is_good else 503, {"Cache-Control": "no-store"})
