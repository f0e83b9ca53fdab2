"""A second, slow and plain answer to 'when does this fire?', sharing no code with the first.

It never computes: it looks at every half minute of a stretch of real time and asks what the wall shows, and
keeps Debian's rule as a running cron daemon would, by remembering which wall times have been served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache
from importlib.resources import files
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
GLANCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Spec:
    """An expression with the sets that it was written from, so that nobody has to parse it."""

    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int] = frozenset(range(1, 32))
    months: frozenset[int] = frozenset(range(1, 13))
    weekdays: frozenset[int] = field(default=frozenset(range(7)))
    """Sunday is 0."""

    @property
    def is_fixed(self) -> bool:
        minute, hour, *_ = self.text.split()
        return minute[0] != "*" and hour[0] != "*"

    def matches_day(self, day: date) -> bool:
        _, _, days, _, weekdays = self.text.split()
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        both = days[0] == "*" or weekdays[0] == "*"
        return day.month in self.months and (by_day and by_weekday if both else by_day or by_weekday)

    def matches(self, wall: datetime) -> bool:
        if wall.second or wall.minute not in self.minutes or wall.hour not in self.hours:
            return False
        return self.matches_day(wall)


def fires_between(spec: Spec, zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """Every fire in (start, end]. The daemon has been up for a day by then, and remembers it."""
    fires: list[datetime] = []
    served: set[datetime] = set()
    now = start - timedelta(days=1, hours=1)
    shown = _shown(now, zone)
    while now < end:
        before, now = shown, now + GLANCE
        shown = _shown(now, zone)
        is_due = False
        skipped = before + GLANCE
        while skipped < shown:
            is_due |= spec.is_fixed and spec.matches(skipped) and skipped not in served
            skipped += GLANCE
        if spec.matches(shown) and (not spec.is_fixed or shown not in served):
            is_due = True
        served.add(shown)
        if is_due and start < now <= end:
            fires.append(now)
    return fires


def _shown(instant: datetime, zone: ZoneInfo) -> datetime:
    return instant.astimezone(zone).replace(tzinfo=None, fold=0)


def walls_after(spec: Spec, wall: datetime, years: int) -> Iterator[datetime]:
    """Matching wall times after `wall`, by looking at every day and every minute of a matching day."""
    day = wall.date()
    while day.year <= wall.year + years:
        if spec.matches_day(day):
            for hour in sorted(spec.hours):
                for minute in sorted(spec.minutes):
                    found = datetime(day.year, day.month, day.day, hour, minute)  # noqa: DTZ001
                    if found > wall:
                        yield found
        day += timedelta(days=1)


@cache
def rules(name: str) -> ZoneInfo:
    """A zone of the `tzdata` package. The machine may carry older rules: British Columbia, until 2026, for one."""
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@cache
def transitions(name: str, first_year: int = 1970, last_year: int = 2037) -> tuple[datetime, ...]:
    """The instants at which the offset of a zone changes, to the second, found by halving stretches of days.

    Two changes within three days that undo each other are overlooked.
    """
    zone, stride = rules(name), timedelta(days=3)
    found: list[datetime] = []
    early = datetime(first_year, 1, 1, tzinfo=UTC)
    held = early.astimezone(zone).utcoffset()
    while early.year <= last_year:
        late = early + stride
        offset = late.astimezone(zone).utcoffset()
        if offset != held:
            found.append(_change(zone, early, late))
        early, held = late, offset
    return tuple(found)


def _change(zone: ZoneInfo, early: datetime, late: datetime) -> datetime:
    held = early.astimezone(zone).utcoffset()
    while late - early > timedelta(seconds=1):
        middle = early + timedelta(seconds=(late - early).total_seconds() // 2)
        early, late = (middle, late) if middle.astimezone(zone).utcoffset() == held else (early, middle)
    return late
