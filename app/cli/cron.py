"""`carillon cron preview`: when an expression fires, by the planner's own walk."""

from __future__ import annotations

import difflib
import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn
from uuid import UUID

import typer

if TYPE_CHECKING:
    from app.domain.recurrence import Fire
    from app.errors import InvalidInput

app = typer.Typer(help="Understand cron expressions.", no_args_is_help=True)

_NO_SCHEDULE = UUID(int=0)


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


@app.callback()
def cron() -> None:
    """Understand cron expressions."""


@app.command()
def preview(
    expression: Annotated[
        str, typer.Argument(metavar="EXPR", help="Five fields or a macro, quoted: '*/5 8-18 * * MON-FRI'.")
    ],
    zone: Annotated[str, typer.Option("--tz", metavar="ZONE", help="IANA name of the time zone.")] = "UTC",
    after: Annotated[
        str | None,
        typer.Option(metavar="ISO", help="List fires after this; without an offset, on ZONE's clock.  [now]"),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, max=1000, help="How many fires.")] = 10,
    output: Annotated[Output, typer.Option("-o", help="A table to read, or JSON.")] = Output.TABLE,
    schedule: Annotated[
        UUID, typer.Option("--schedule-id", help="The schedule that H is hashed from.")
    ] = _NO_SCHEDULE,
) -> None:
    """List the next fires of EXPR, with what clock changes do to them."""
    from app.domain.ids import ScheduleId
    from app.domain.recurrence import Cron, preview, validate
    from app.errors import InvalidInput

    recurrence = Cron(expression, zone)
    try:
        start = _instant(after, zone) if after is not None else datetime.now(UTC)
        validate(recurrence, now=start, schedule_id=ScheduleId(schedule))
        fires = preview(recurrence, start, count, ScheduleId(schedule))
    except InvalidInput as error:
        _fail(_OPTIONS.get(error.field, error.field), _for_people(error, zone))
    remarks = _remarks(expression, schedule)
    match output:
        case Output.JSON:
            typer.echo(json.dumps({"fires": [_line(fire) for fire in fires], "remarks": remarks}))
        case Output.TABLE:
            typer.echo(_table(fires, zone))
            for remark in remarks:
                typer.echo(f"\n{remark}")


_OPTIONS = {"recurrence.cron": "EXPR", "recurrence.timezone": "--tz"}


def _for_people(error: InvalidInput, zone: str) -> str:
    """The problem in the words of this command, with what was probably meant."""
    problem = error.problem
    for field, option in _OPTIONS.items():
        problem = problem.replace(field, option)
    hint = _nearest_zone(zone) if error.field == "recurrence.timezone" else None
    return f"{problem} ({hint})" if hint and "did you mean" not in problem else problem


def _nearest_zone(name: str) -> str | None:
    from app.domain import zones

    spelled = {known.lower(): known for known in zones.names()}
    last = {known.rpartition("/")[2]: known for known in sorted(spelled, reverse=True)}
    wanted = name.strip().lower().replace(" ", "_")
    near = difflib.get_close_matches(wanted, [*spelled, *last], n=1, cutoff=0.75)
    return f"did you mean {spelled[last.get(near[0], near[0])]!r}?" if near else None


def _instant(text: str, zone: str) -> datetime:
    """`text` as an instant; without an offset it is read on the clock of `zone`, first showing."""
    from app.domain import zones

    rules = zones.load(zone)
    try:
        read = datetime.fromisoformat(text)
        return (read if read.tzinfo else read.replace(tzinfo=rules)).astimezone(UTC)
    except (ValueError, OverflowError):
        _fail("--after", f"{text!r} is not an ISO 8601 date and time, such as 2026-03-29T00:00:00Z")


def _line(fire: Fire) -> dict[str, str | None]:
    return {"at": _utc(fire.at), "local": fire.local, "note": fire.note}


def _utc(instant: datetime) -> str:
    return instant.isoformat().replace("+00:00", "Z")


def _table(fires: list[Fire], zone: str) -> str:
    rows = [("UTC", zone, ""), *((_utc(fire.at), fire.local, fire.note or "") for fire in fires)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{at:{widths[0]}}  {local:{widths[1]}}  {note}".rstrip() for at, local, note in rows)


def _remarks(expression: str, schedule: UUID) -> list[str]:
    """What people misread most, where it applies."""
    from app.domain import cron_text
    from app.domain.ids import ScheduleId

    remarks: list[str] = []
    _, _, day, _, weekday = cron_text.plain(expression, ScheduleId(schedule)).split(" ")
    if "*" not in (day, weekday):
        both = day.startswith("*") or weekday.startswith("*")
        rule = "both must match, since one begins with *" if both else "it fires when either matches"
        remarks.append(f"Day of month and day of week are both set: {rule}.")
    if cron_text.uses_hash(expression):
        remarks.append(
            f"H is hashed from the schedule's id; this is for {schedule} (choose with --schedule-id)."
        )
    return remarks


def _fail(where: str, problem: str) -> NoReturn:
    typer.echo(f"{where}: {problem}", err=True)
    raise typer.Exit(2)
