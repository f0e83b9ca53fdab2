"""Cron: which instants an expression stands for in a time zone.

Two libraries, each for what it does right (`docs/decisions/cron-libraries.md`): cronsim walks the calendar,
on the text and always on a bare wall clock; croniter is the second opinion on what the text means. An
expression is accepted when both read it alike and a first fire is found. How wall times become instants is
decided here, by Debian cron's rule (crontab(5), cron(8)):

* a *fixed-time* schedule, where neither minute nor hour begins with a star: a time that the clock skips fires
  once, at the jump; a time that the clock shows twice fires once, the first time;
* any other follows real time: skipped times do not fire, repeated times fire twice.

Unlike Debian's, the rule has no upper bound of three hours: a zone that skips a whole day loses no
occurrence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from typing import TypeVar
from uuid import UUID

from croniter import croniter
from cronsim import CronSim, CronSimError

from app.domain import cron_text, zones
from app.domain.ids import EPOCH, ScheduleId
from app.errors import InvalidInput

_ANY = ScheduleId(UUID(int=0))
_BEFORE_ALL = EPOCH - timedelta(seconds=1)
_SOME_WALL_TIME = datetime(2000, 1, 1)  # noqa: DTZ001 -- a wall clock has no zone
_EVERY = (range(60), range(24), range(1, 32), range(1, 13), range(7))

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Step:
    """One instant (`at`, UTC) and what the wall clock has to do with it.

    `asked` is the wall time of the expression that it stands for; `skipped` is the first wall time since the
    last fire that would have fired, had the clock not jumped over it.
    """

    at: datetime
    asked: datetime
    skipped: datetime | None


def next_fire(expression: str, timezone: str, after: datetime, *, schedule_id: ScheduleId) -> datetime | None:
    """The first instant strictly after `after` (aware), in UTC, on a whole second; None when there is none.

    There is none when the calendar ends (year 9999) or nothing matches within 50 years. Occurrences start in
    1970: an earlier `after` counts as just before it. Successive fires strictly increase.
    Raises InvalidInput.
    """
    step = next_step(expression, timezone, after, schedule_id=schedule_id)
    return None if step is None else step.at


def next_step(expression: str, timezone: str, after: datetime, *, schedule_id: ScheduleId) -> Step | None:
    """As `next_fire`, with what the wall clock has to do with it."""
    # In UTC, since the memo would take both showings of a repeated wall time for the same key.
    return _next(cron_text.plain(expression, schedule_id), timezone, zones.utc(after))


def check(expression: str, timezone: str) -> None:
    """Refuse what no schedule could use. Raises InvalidInput.

    Whether an expression with `H` ever fires depends on the schedule's id, so that is not asked here.
    """
    zones.load(timezone)
    text = cron_text.plain(expression, _ANY)
    if not cron_text.uses_hash(expression):
        _walker(text)


def note(step: Step, expression: str, timezone: str, *, schedule_id: ScheduleId) -> str | None:
    """What a person should know about the clock change that `step` falls into; None on all ordinary days."""
    zone = zones.load(timezone)
    shown = zones.wall(step.at, zone)
    if shown != step.asked:
        asked = _clock(step.asked, shown)
        return f"fires {shown:%H:%M} instead of {asked}: {_jump(step.asked, zone)}"
    if step.skipped is not None:
        return f"nothing fires at {_clock(step.skipped, shown)}: {_jump(step.skipped, zone)}"
    if zones.repeats_after(shown, zone):
        text = cron_text.plain(expression, schedule_id)
        times = "once, the first time" if _is_fixed(text) else "both times"
        return f"this local time happens twice; fires {times}"
    return None


def _jump(skipped: datetime, zone: tzinfo) -> str:
    jump, length = zones.gap(skipped, zone)
    lands = zones.wall(jump, zone)
    leaves = lands - length
    return f"the clock jumps from {_clock(leaves, lands)} to {_clock(lands, leaves)}"


def _clock(wall_time: datetime, beside: datetime) -> str:
    """The time of day, with its date where it is not on the day of `beside`."""
    return f"{wall_time:%H:%M}" if wall_time.date() == beside.date() else f"{wall_time:%Y-%m-%d %H:%M}"


@lru_cache(maxsize=16_384)
def _next(text: str, timezone: str, after: datetime) -> Step | None:
    zone = zones.load(timezone)
    walker = _walker(text)
    after = max(after, _BEFORE_ALL)
    try:
        now = zones.wall(after, zone)
        if _is_fixed(text):
            return _first_fixed(_walls(walker, now), zone, after)
        # Inside a repeated hour, wall times of its second pass lie behind the wall clock of the first.
        return _first_real(_walls(walker, now - zones.repeats_after(now, zone)), zone, after)
    except OverflowError:
        return None


def _is_fixed(text: str) -> bool:
    """Debian's test, on the text: `0-59 2 * * *` is a list of fixed times, `*/15 2 * * *` is a rhythm."""
    minute, hour, *_ = text.split(" ")
    return not minute.startswith("*") and not hour.startswith("*")


def _first_fixed(walls: Iterable[datetime], zone: tzinfo, after: datetime) -> Step | None:
    for asked in walls:
        happens = zones.instants(asked, zone)
        at = happens[0] if happens else zones.gap(asked, zone)[0]
        if at > after:
            return Step(at, asked, None)
    return None


def _first_real(walls: Iterable[datetime], zone: tzinfo, after: datetime) -> Step | None:
    best: Step | None = None
    skipped: datetime | None = None
    for asked in walls:
        happens = zones.instants(asked, zone)
        if not happens:
            skipped = skipped or asked
            continue
        for at in happens:
            if at > after and (best is None or at < best.at):
                best = Step(at, asked, skipped)
        # First showings only increase: nothing later on the wall clock can come before this one.
        if happens[0] > after:
            return best
    return best


def _walls(walker: CronSim, start: datetime) -> Iterator[datetime]:
    """Matching wall times strictly after `start`, until the calendar ends or 50 years hold no match."""
    walk = copy.copy(walker)
    walk.dt = start.replace(microsecond=0)
    try:
        yield from walk
    except (OverflowError, ValueError):  # how the end of year 9999 shows
        return


@lru_cache(maxsize=8192)
def _walker(text: str) -> CronSim:
    """The expression as cronsim reads it. Raises InvalidInput unless croniter reads the same."""
    walker = _ask(CronSim, text, _SOME_WALL_TIME)
    expanded, nth_weekdays = _ask(croniter.expand, text)
    first: tuple[Iterable[object], ...] = (
        walker.minutes,
        walker.hours,
        walker.days,
        walker.months,
        walker.weekdays,
    )
    second: list[set[object]] = [
        set(every) if "*" in read else set(read) for every, read in zip(_EVERY, expanded, strict=True)
    ]
    if nth_weekdays:
        second[4] = {(day, nth) for day, some in nth_weekdays.items() for nth in some}
    for place, part, mine, theirs in zip(cron_text.FIELDS, text.split(" "), first, second, strict=True):
        if {_in_words_of_croniter(value, place) for value in mine} != theirs:
            cron_text.refuse(
                f"{place.name}: cron programs disagree on {part!r}; write a range (a-b) or a list (a,b)"
            )
    return walker


def _in_words_of_croniter(value: object, place: cron_text.Field) -> object:
    if value == CronSim.LAST:
        return "l"
    return value % 7 if place is cron_text.WEEKDAY and isinstance(value, int) else value


def _ask(reader: Callable[..., _Result], text: str, *rest: object) -> _Result:
    try:
        return reader(text, *rest)
    except Exception as error:
        # Whatever a library throws, of whatever class: the expression is what is wrong.
        if isinstance(error, CronSimError) and cron_text.DAY.name in str(error):
            problem = f"{cron_text.DAY.name}: never fires, none of its months has such a day"
        else:
            problem = "cron programs do not agree that this is an expression"
        raise InvalidInput("recurrence.cron", problem) from error
