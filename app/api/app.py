"""The application: routes, edge and problems put together. No state but what it is given."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from app.api import cron, health, openapi, pages, problems, runs, schedules, tenants
from app.api.deps import ApiDeps
from app.api.edge import Edge


def create_app(deps: ApiDeps) -> FastAPI:
    """The API over `deps`. The caller owns the pool and serves the application."""
    app = blank_app()
    app.state.deps = deps
    return app


def blank_app() -> FastAPI:
    """The application without anything to work on: enough to describe itself.

    The body limit is that of `app.api.reading`, not fastapi's own, whose 413 is plain text and replaces
    even a 401.
    """
    app = _Application(
        title=openapi.TITLE,
        version=openapi.CONTRACT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    for part in (
        schedules.readers,
        schedules.writers,
        runs.readers,
        runs.writers,
        cron.router,
        tenants.router,
        health.router,
        pages.router,
    ):
        app.include_router(part)
    problems.install(app)
    app.add_middleware(Edge)
    return app


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.document(self)
        return self.openapi_schema
