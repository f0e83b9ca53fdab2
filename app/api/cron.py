"""Trying out a cron expression before anything depends on it."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from uuid import UUID

from fastapi import APIRouter, Request
from pydantic import Field

from app.api.auth import CurrentCaller, ReadRoute
from app.api.deps import deps_of
from app.api.models_schedule import Faults
from app.api.values import Body, Instant, Shown, Text
from app.domain import cron_text, zones
from app.domain import recurrence as recurrences
from app.domain.ids import ScheduleId
from app.domain.recurrence import Fire, Recurrence
from app.errors import InvalidInput
from app.store.planning import database_now
from app.store.pool import acquire

router = APIRouter(prefix="/v1/cron", tags=["cron"], route_class=ReadRoute)

COUNT_MAX = 100
HORIZON = timedelta(days=36_525)
"""A hundred years. The 100th fire of `0 0 * 2 1#5` is in the year 4692, and the way there takes half a second."""
NO_SCHEDULE = UUID(int=0)


class PreviewBody(Body):
    cron: Text = Field(max_length=256)
    timezone: Text = Field("UTC", max_length=100, description="IANA name.")
    after: Instant | None = Field(None, description="Fires strictly after this; from now on when left out.")
    count: int = Field(5, strict=True, ge=1, le=COUNT_MAX)
    schedule_id: UUID = Field(NO_SCHEDULE, description="The schedule that H stands for; matters only with H.")


class FireShown(Shown):
    at: datetime
    local: str = Field(description="The same instant on the zone's clocks.")
    note: str | None = Field(description="What a clock change does to this fire.")


class Preview(Shown):
    fires: list[FireShown] = Field(
        description="Fewer than asked for when the rule ends, or when the next ones are more than 100 years away."
    )


@router.post("/preview")
async def preview_cron(body: PreviewBody, caller: CurrentCaller, request: Request) -> Preview:  # noqa: ARG001
    """List the next fires of a cron expression, and what clock changes do to them."""
    rule = {"kind": "cron", "cron": body.cron, "timezone": body.timezone}
    async with acquire(deps_of(request).pool) as conn:
        now = await database_now(conn)
    schedule = ScheduleId(body.schedule_id)
    faults = Faults(inside="recurrence.")  # here the rule is the body itself
    faults.of(lambda: zones.load(body.timezone))
    faults.of(lambda: cron_text.plain(body.cron, schedule))
    faults.raise_any()
    try:
        recurrence = recurrences.parse(rule, now=now)
        fires = await _walk(recurrence, body.after or now, body.count, schedule)
    except InvalidInput as error:
        raise InvalidInput(error.field.removeprefix("recurrence."), error.problem) from None
    return Preview(fires=[FireShown(at=fire.at, local=fire.local, note=fire.note) for fire in fires])


async def _walk(recurrence: Recurrence, after: datetime, count: int, schedule: ScheduleId) -> list[Fire]:
    """The next fires within `HORIZON`, found one by one: between two of them the loop's other work goes on."""
    fires: list[Fire] = []
    last = after
    while len(fires) < count and (found := recurrences.preview(recurrence, last, 1, schedule)):
        last = found[0].at
        if last - after > HORIZON:
            break
        fires += found
        await asyncio.sleep(0)
    return fires
