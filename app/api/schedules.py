"""The schedules of the caller's tenant: make, read, change, pause, resume, run now, delete."""

from __future__ import annotations

import re
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Header, Query, Request, Response

from app.api import cursor
from app.api.auth import CurrentCaller, ReadRoute, WriteRoute
from app.api.cursor import Mark
from app.api.deps import deps_of
from app.api.models_run import RunShown, show_run
from app.api.models_schedule import (
    DispositionPage,
    PauseBody,
    ScheduleBody,
    ScheduleChangeBody,
    SchedulePage,
    ScheduleQuery,
    ScheduleShown,
    show_disposition,
    show_schedule,
)
from app.api.problems import ProblemError
from app.api.reading import NO_BODY
from app.api.values import Paging, ScheduleIdInPath
from app.domain.ids import ScheduleId
from app.domain.schedule import Damaged, Schedule, ScheduleStatus
from app.errors import Conflict
from app.store import edits, history, schedules
from app.store.planning import database_now
from app.store.pool import acquire, transaction

PREFIX = "/v1/schedules"
readers = APIRouter(prefix=PREFIX, tags=["schedules"], route_class=ReadRoute)
writers = APIRouter(prefix=PREFIX, tags=["schedules"], route_class=WriteRoute)

IfMatch = Annotated[
    str | None,
    Header(
        max_length=100,
        description="The ETag that was read: the change happens only if nobody has changed the schedule since.",
    ),
]
_ETAG = re.compile(r'"(\d{1,9})"', re.ASCII)


@writers.post("", status_code=201)
async def create_schedule(
    body: ScheduleBody, caller: CurrentCaller, request: Request, response: Response
) -> ScheduleShown:
    """Create a schedule. It is active at once; its first occurrence is the rule's first from now on."""
    deps = deps_of(request)
    async with transaction(deps.pool) as conn:
        schedule = body.to_schedule(
            ScheduleId(uuid4()), caller.tenant_id, now=await database_now(conn), policy=deps.address_policy
        )
        await schedules.insert(conn, caller.tenant_id, schedule)
    response.headers["Location"] = f"{PREFIX}/{schedule.id}"
    return _tagged(schedule, response)


@readers.get("")
async def list_schedules(
    query: Annotated[ScheduleQuery, Query()], caller: CurrentCaller, request: Request, response: Response
) -> SchedulePage:
    """List the schedules, newest first."""
    binding = cursor.binding_of(request, caller.tenant_id)
    mark = cursor.read(query.cursor, binding) if query.cursor else None
    async with acquire(deps_of(request).pool) as conn:
        found = await schedules.list_page(
            conn,
            caller.tenant_id,
            status=None if query.status is None else ScheduleStatus(query.status),
            after=(mark.at, mark.id) if mark else None,
            limit=query.limit + 1,
        )
    page = found[: query.limit]
    following = None
    if len(found) > query.limit:
        following = cursor.write(Mark(at=page[-1].created_at, id=page[-1].id), binding)
    cursor.link_next(request, response, following)
    return SchedulePage(schedules=[show_schedule(schedule) for schedule in page], next_cursor=following)


@readers.get("/{schedule_id}")
async def get_schedule(
    schedule_id: ScheduleIdInPath, caller: CurrentCaller, request: Request, response: Response
) -> ScheduleShown:
    """Read one schedule."""
    async with acquire(deps_of(request).pool) as conn:
        return _tagged(await schedules.get(conn, caller.tenant_id, schedule_id), response)


@writers.patch("/{schedule_id}")
async def change_schedule(
    schedule_id: ScheduleIdInPath,
    body: ScheduleChangeBody,
    caller: CurrentCaller,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
) -> ScheduleShown:
    """Change a schedule. A field given replaces the old value as a whole; a field left out stays.

    A changed recurrence starts at its first instant from now on; planned runs it does not produce are
    cancelled."""
    deps = deps_of(request)
    expected = _version(if_match)
    async with transaction(deps.pool) as conn:
        old = await schedules.get(conn, caller.tenant_id, schedule_id)
        change = body.to_change(old, now=await database_now(conn), policy=deps.address_policy)
        try:
            schedule = await edits.update(
                conn, caller.tenant_id, schedule_id, change, expected_version=expected, limits=deps.limits
            )
        except Conflict as error:
            raise _mismatch(error, if_match) from None
    return _tagged(schedule, response)


@writers.delete("/{schedule_id}", status_code=204)
async def delete_schedule(
    schedule_id: ScheduleIdInPath, caller: CurrentCaller, request: Request, if_match: IfMatch = None
) -> None:
    """Delete a schedule for good. Its open runs are cancelled; its history stays readable under /v1/runs."""
    expected = _version(if_match)
    async with transaction(deps_of(request).pool) as conn:
        try:
            await edits.delete(conn, caller.tenant_id, schedule_id, expected_version=expected)
        except Conflict as error:
            raise _mismatch(error, if_match) from None


@writers.post("/{schedule_id}/pause")
async def pause_schedule(
    schedule_id: ScheduleIdInPath,
    caller: CurrentCaller,
    request: Request,
    response: Response,
    body: PauseBody | None = None,
) -> ScheduleShown:
    """Stop firing until resumed. Pausing a paused schedule changes nothing."""
    async with transaction(deps_of(request).pool) as conn:
        schedule = await edits.pause(
            conn,
            caller.tenant_id,
            schedule_id,
            reason=body.reason if body else None,
            limits=deps_of(request).limits,
        )
    return _tagged(schedule, response)


@writers.post("/{schedule_id}/resume", dependencies=[NO_BODY])
async def resume_schedule(
    schedule_id: ScheduleIdInPath, caller: CurrentCaller, request: Request, response: Response
) -> ScheduleShown:
    """Fire again from now on. What fell into the pause is recorded as dispositions, not made up for."""
    async with transaction(deps_of(request).pool) as conn:
        return _tagged(await edits.resume(conn, caller.tenant_id, schedule_id), response)


@writers.post("/{schedule_id}/run", status_code=202, dependencies=[NO_BODY])
async def run_schedule(
    schedule_id: ScheduleIdInPath, caller: CurrentCaller, request: Request, response: Response
) -> RunShown:
    """Run a schedule now, beside its rule; a paused or finished one too."""
    async with transaction(deps_of(request).pool) as conn:
        ref = await edits.run_now(conn, caller.tenant_id, schedule_id)
        run = await history.get_run(conn, caller.tenant_id, ref.id)
    await deps_of(request).announce([ref])
    response.headers["Location"] = f"/v1/runs/{ref.id}"
    return show_run(run)


@readers.get("/{schedule_id}/dispositions")
async def list_dispositions(
    schedule_id: ScheduleIdInPath,
    query: Annotated[Paging, Query()],
    caller: CurrentCaller,
    request: Request,
    response: Response,
) -> DispositionPage:
    """List the occurrences that have no run, with the reason, newest first; of deleted schedules too."""
    schedule = ScheduleId(schedule_id)
    binding = cursor.binding_of(request, caller.tenant_id)
    before = cursor.read(query.cursor, binding).at if query.cursor else schedules.NEWEST[0]
    async with acquire(deps_of(request).pool) as conn:
        await history.require_schedule(conn, caller.tenant_id, schedule)
        found = await history.list_dispositions(
            conn, caller.tenant_id, schedule, before=before, limit=query.limit + 1
        )
    page = found[: query.limit]
    following = cursor.write(Mark(at=page[-1].first_at), binding) if len(found) > query.limit else None
    cursor.link_next(request, response, following)
    return DispositionPage(dispositions=[show_disposition(one) for one in page], next_cursor=following)


def _tagged(schedule: Schedule | Damaged, response: Response) -> ScheduleShown:
    response.headers["ETag"] = f'"{schedule.version}"'
    return show_schedule(schedule)


def _version(if_match: str | None) -> int | None:
    """The version that If-Match names; None for any (`*`, or no header)."""
    if if_match is None or if_match.strip() == "*":
        return None
    shape = _ETAG.fullmatch(if_match.strip())
    if shape is None:
        raise ProblemError("precondition-failed", "If-Match must be the ETag of a schedule as it was read")
    return int(shape[1])


def _mismatch(error: Conflict, if_match: str | None) -> Exception:
    return error if if_match is None else ProblemError("precondition-failed", str(error))
