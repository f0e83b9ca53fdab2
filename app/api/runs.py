"""The history of the caller's tenant: its runs and their attempts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api import cursor
from app.api.auth import CurrentCaller, ReadRoute, WriteRoute
from app.api.cursor import Mark
from app.api.deps import deps_of
from app.api.models_run import (
    AttemptList,
    RunDetail,
    RunPage,
    RunQuery,
    RunShown,
    show_attempt,
    show_run,
    show_run_detail,
)
from app.api.problems import query_problem
from app.api.reading import NO_BODY
from app.api.values import RunIdInPath
from app.domain.ids import EPOCH, ScheduleId
from app.store import edits, history
from app.store.history import Place, Window
from app.store.planning import database_now
from app.store.pool import Connection, acquire, transaction

PREFIX = "/v1/runs"
readers = APIRouter(prefix=PREFIX, tags=["runs"], route_class=ReadRoute)
writers = APIRouter(prefix=PREFIX, tags=["runs"], route_class=WriteRoute)

DEFAULT_WINDOW = timedelta(days=7)


@readers.get("")
async def list_runs(
    query: Annotated[RunQuery, Query()], caller: CurrentCaller, request: Request, response: Response
) -> RunPage:
    """List the runs, newest scheduled_for first.

    A page looks at a bounded number of runs, so with a `status` it may be short, or empty, and still have a
    `next_cursor`: the end is where that is null.
    """
    binding = cursor.binding_of(request, caller.tenant_id)
    async with acquire(deps_of(request).pool) as conn:
        window, place = await _walk(conn, query, binding, deps_of(request).lookahead)
        page = await history.list_runs(
            conn,
            caller.tenant_id,
            window=window,
            after=place,
            schedule=None if query.schedule_id is None else ScheduleId(query.schedule_id),
            statuses=query.status,
            limit=query.limit,
        )
    following = None
    if page.next_place is not None:
        mark = Mark(page.next_place.scheduled_for, page.next_place.id, window.from_at, window.to_at)
        following = cursor.write(mark, binding)
    cursor.link_next(request, response, following)
    return RunPage(runs=[show_run(run) for run in page.runs], next_cursor=following)


@readers.get("/{run_id}")
async def get_run(run_id: RunIdInPath, caller: CurrentCaller, request: Request) -> RunDetail:
    """Read one run with its attempts."""
    async with acquire(deps_of(request).pool) as conn:
        run = await history.get_run(conn, caller.tenant_id, run_id)
        attempts = await history.list_attempts(conn, caller.tenant_id, run_id)
    return show_run_detail(run, attempts)


@readers.get("/{run_id}/attempts")
async def list_attempts(run_id: RunIdInPath, caller: CurrentCaller, request: Request) -> AttemptList:
    """List the attempts of a run, first to last; a run has 8 at most."""
    async with acquire(deps_of(request).pool) as conn:
        await history.get_run(conn, caller.tenant_id, run_id)
        attempts = await history.list_attempts(conn, caller.tenant_id, run_id)
    return AttemptList(attempts=[show_attempt(attempt) for attempt in attempts])


@writers.post("/{run_id}/cancel", status_code=202, dependencies=[NO_BODY])
async def cancel_run(run_id: RunIdInPath, caller: CurrentCaller, request: Request) -> RunShown:
    """Cancel a run: at once when no executor holds it, else its executor is asked to stop (see
    cancel_requested_at; the request may have reached the target by then). Cancelling a cancelled run
    changes nothing."""
    async with transaction(deps_of(request).pool) as conn:
        await edits.cancel_run(conn, caller.tenant_id, run_id)
        return show_run(await history.get_run(conn, caller.tenant_id, run_id))


async def _walk(
    conn: Connection, query: RunQuery, binding: cursor.Binding, lookahead: timedelta
) -> tuple[Window, Place | None]:
    """The window of the walk and the place in it; a cursor carries both, so "the last 7 days" do not move."""
    if query.cursor is not None:
        mark = cursor.read(query.cursor, binding)
        return Window(mark.from_at, mark.to_at), Place(mark.at, mark.id)
    if query.from_at is not None and query.to_at is not None and query.from_at >= query.to_at:
        raise query_problem("from", "must be before `to`")
    to_at = query.to_at or _planned_until(await database_now(conn), lookahead)
    return Window(query.from_at or max(to_at - DEFAULT_WINDOW, EPOCH), to_at), None


def _planned_until(now: datetime, lookahead: timedelta) -> datetime:
    return now + lookahead + timedelta(seconds=1)
