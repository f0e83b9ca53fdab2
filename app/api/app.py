"""The application: routes, edge and problems put together. No state but what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI

from app.api import cron, health, openapi, pages, problems, runs, schedules, tenants
from app.api.deps import ApiDeps
from app.api.edge import Edge

API = (
    schedules.readers,
    schedules.writers,
    runs.readers,
    runs.writers,
    cron.router,
    tenants.router,
    health.router,
    pages.router,
)
PROBES = (health.router,)


def create_app(deps: ApiDeps) -> FastAPI:
    """The API over `deps`. The caller owns the pool and serves the application."""
    app = blank_app()
    app.state.deps = deps
    return app


def create_probes(deps: ApiDeps) -> FastAPI:
    """For a replica without the API's role: health and metrics alone."""
    app = _made_of(PROBES, openapi_url=None)
    app.state.deps = deps
    return app


def blank_app() -> FastAPI:
    """The API without anything to work on: enough to describe itself."""
    return _made_of(API, openapi_url="/openapi.json")


def _made_of(parts: Sequence[APIRouter], *, openapi_url: str | None) -> FastAPI:
    """The body limit is that of `app.api.reading`, not fastapi's own, whose 413 is plain text and replaces even a
    401."""
    app = _Application(
        title=openapi.TITLE,
        version=openapi.CONTRACT,
        openapi_url=openapi_url,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    for part in parts:
        app.include_router(part)
    problems.install(app)
    app.add_middleware(Edge)
    return app


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.document(self)
        return self.openapi_schema
