"""When a schedule fires: by cron, at an interval, or once.

A recurrence is data; what it means is in `next_fire`. As JSON, in the API and in the `schedule` table alike:

    {"kind": "cron", "cron": "*/5 * * * *", "timezone": "Europe/Berlin"}
    {"kind": "every", "every_seconds": 5, "anchor": "2026-01-01T00:00:00Z"}
    {"kind": "once", "at": "2026-01-01T00:00:00Z"}

Another kind is one dataclass, one reader in `_READERS`, and one `case` in each `match` (the type checker
finds them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import NoReturn, assert_never

from app.domain import cron, zones
from app.domain.ids import EPOCH, MILLISECOND, ScheduleId
from app.errors import InvalidInput

SHORTEST = timedelta(seconds=1)
LONGEST = timedelta(days=366)
_LONGEST_ZONE = 100
_SHOWN_CHARACTERS = 100
"""Of a key that has no place, which may be of any length."""


@dataclass(frozen=True, slots=True)
class Cron:
    """The instants of a cron expression (`app.domain.cron_text`) on the clocks of an IANA time zone.

    Not checked here: the text is judged where it is used, with the schedule's id, which `H` depends on.
    """

    expression: str
    timezone: str


@dataclass(frozen=True, slots=True)
class Every:
    """Every `anchor` + k * `interval` for k = 0, 1, 2 …; whole milliseconds, 1 second to 366 days.

    Elapsed time, not wall time: clock changes do not touch it. Raises InvalidInput.
    """

    interval: timedelta
    anchor: datetime

    def __post_init__(self) -> None:
        if not SHORTEST <= self.interval <= LONGEST:
            raise InvalidInput("recurrence.every_seconds", f"must be 1 to {LONGEST // SHORTEST}")
        if self.interval % MILLISECOND:
            raise InvalidInput("recurrence.every_seconds", "must be whole milliseconds: at most 3 decimals")
        _check_instant("recurrence.anchor", self.anchor)


@dataclass(frozen=True, slots=True)
class Once:
    """One instant, on a whole millisecond. Raises InvalidInput."""

    at: datetime

    def __post_init__(self) -> None:
        _check_instant("recurrence.at", self.at)


Recurrence = Cron | Every | Once


def _check_instant(field: str, instant: datetime) -> None:
    if instant.tzinfo is None:
        raise InvalidInput(field, "needs an offset from UTC, such as Z or +02:00")
    if instant < EPOCH:
        raise InvalidInput(field, "must not be before 1970-01-01T00:00:00Z")
    if instant.microsecond % 1000:
        raise InvalidInput(field, "must be a whole millisecond: at most 3 decimals")


def next_fire(recurrence: Recurrence, after: datetime, *, schedule_id: ScheduleId) -> datetime | None:
    """The first instant strictly after `after` (aware), in UTC, whole milliseconds; None when none is left.

    Fires before 1970 or after 9999 do not exist. Raises InvalidInput when a cron expression or its zone is
    unusable: the planner must expect that of a stored schedule too, since a release may drop a zone.
    """
    after = zones.utc(after)
    match recurrence:
        case Cron(expression, timezone):
            return cron.next_fire(expression, timezone, after, schedule_id=schedule_id)
        case Every(interval, anchor):
            if after < anchor:
                return anchor.astimezone(UTC)
            try:
                return anchor.astimezone(UTC) + ((after - anchor) // interval + 1) * interval
            except OverflowError:
                return None
        case Once(at):
            return at.astimezone(UTC) if at > after else None
        case _:
            assert_never(recurrence)


def validate(recurrence: Recurrence, *, now: datetime, schedule_id: ScheduleId) -> datetime:
    """The first fire after `now`, in UTC: the proof that the schedule does something. Raises InvalidInput."""
    first = next_fire(recurrence, now, schedule_id=schedule_id)
    if first is not None:
        return first
    match recurrence:
        case Cron():
            raise InvalidInput("recurrence.cron", "never fires: nothing matches within 50 years")
        case Every():
            raise InvalidInput(
                "recurrence.every_seconds", "never fires: the calendar ends with the year 9999"
            )
        case Once():
            raise InvalidInput("recurrence.at", f"must be in the future; it is now {_iso(now)}")
        case _:
            assert_never(recurrence)


def to_json(recurrence: Recurrence) -> dict[str, str | int | float]:
    """The JSON form, for the `schedule` table and the API."""
    match recurrence:
        case Cron(expression, timezone):
            return {"kind": "cron", "cron": expression, "timezone": timezone}
        case Every(interval, anchor):
            # One division, rounded once: whole part plus fraction would give 1.9060000000000001 for 1.906.
            seconds = interval / SHORTEST
            number = int(seconds) if seconds.is_integer() else seconds
            return {"kind": "every", "every_seconds": number, "anchor": _iso(anchor)}
        case Once(at):
            return {"kind": "once", "at": _iso(at)}
        case _:
            assert_never(recurrence)


@lru_cache(maxsize=16_384)
def from_json(text: str) -> Recurrence:
    """What `to_json` wrote, however the database has ordered and spaced it; unknown keys are passed over.

    Raises InvalidInput.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("recurrence", "is not JSON") from error
    if not isinstance(data, dict):
        raise InvalidInput("recurrence", "must be an object")
    return _reader(data).read(data)


def parse(data: Mapping[str, object], *, now: datetime, old: Recurrence | None = None) -> Recurrence:
    """What a person wrote, checked strictly: wrong, missing and misplaced keys are refused by name.

    `timezone` may be left out (UTC), and so may `anchor`: it is that of `old` where that is the same interval (so
    that sending it again moves nothing), else `now`, cut to the millisecond. None counts as left out. Whether it
    ever fires is `validate`'s question. Raises InvalidInput.
    """
    if not isinstance(data, Mapping):
        raise InvalidInput("recurrence", "must be an object")
    given = {key: value for key, value in data.items() if value is not None}
    reader = _reader(given)
    for key in given:
        if key not in reader.keys:
            raise InvalidInput(
                f"recurrence.{key[:_SHOWN_CHARACTERS]}",
                f"has no place here; allowed are {', '.join(reader.keys)}",
            )
    anchor = now - timedelta(microseconds=now.microsecond % 1000)
    recurrence = reader.read({"timezone": "UTC", "anchor": anchor, **given})
    if isinstance(recurrence, Cron):
        if len(recurrence.timezone) > _LONGEST_ZONE:
            _refuse(
                "timezone", f"is {len(recurrence.timezone)} characters long; no time zone's name is so long"
            )
        cron.check(recurrence.expression, recurrence.timezone)
    if isinstance(recurrence, Every) and "anchor" not in given and isinstance(old, Every):
        return old if old.interval == recurrence.interval else recurrence
    return recurrence


@dataclass(frozen=True, slots=True)
class _Reader:
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, object]], Recurrence]


def _reader(data: Mapping[str, object]) -> _Reader:
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _READERS:
        raise InvalidInput("recurrence.kind", f"must be one of {', '.join(_READERS)}")
    return _READERS[kind]


def _read_cron(data: Mapping[str, object]) -> Cron:
    return Cron(_text(data, "cron"), _text(data, "timezone"))


def _read_every(data: Mapping[str, object]) -> Every:
    seconds = data.get("every_seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | Decimal):
        _refuse("every_seconds", "must be a number of seconds")
    # Through the shortest text that means this number: 0.1 as binary is not a whole millisecond.
    exact = Decimal(str(seconds)) if isinstance(seconds, float) else Decimal(seconds)
    if not exact.is_finite() or not 1 <= exact <= LONGEST // SHORTEST:
        _refuse("every_seconds", f"must be 1 to {LONGEST // SHORTEST}")
    if exact * 1000 % 1:
        _refuse("every_seconds", "must be whole milliseconds: at most 3 decimals")
    return Every(timedelta(milliseconds=int(exact * 1000)), _instant(data, "anchor"))


def _read_once(data: Mapping[str, object]) -> Once:
    return Once(_instant(data, "at"))


_READERS: Mapping[str, _Reader] = {
    "cron": _Reader(("kind", "cron", "timezone"), _read_cron),
    "every": _Reader(("kind", "every_seconds", "anchor"), _read_every),
    "once": _Reader(("kind", "at"), _read_once),
}


def _text(data: Mapping[str, object], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        _refuse(key, "must be text")
    return value


_ISO = re.compile(
    r"(?P<head>[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.(?P<fraction>[0-9]{1,9}))?"
    r"(?P<offset>[Zz]|[+-][0-9]{2}:[0-9]{2})"
)


def _instant(data: Mapping[str, object], key: str) -> datetime:
    """RFC 3339, section 5.6, or an aware datetime; in UTC. (`fromisoformat` drops a seventh decimal.)"""
    value = data.get(key)
    if isinstance(value, str) and (iso := _ISO.fullmatch(value)):
        if (iso["fraction"] or "")[3:].strip("0"):
            _refuse(key, "must be a whole millisecond: at most 3 decimals")
        fraction = (iso["fraction"] or "0")[:3].ljust(3, "0")
        try:
            value = datetime.fromisoformat(f"{iso['head']}.{fraction}{iso['offset']}".upper())
        except ValueError:
            _refuse(key, f"{value!r} is not a date and time that exists")
    if not isinstance(value, datetime):
        _refuse(key, "must be a date and time with its offset from UTC, such as 2026-01-31T09:00:00Z")
    if value.tzinfo is None:
        _refuse(key, "needs an offset from UTC, such as Z or +02:00")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        _refuse(key, "is outside the years 1970 to 9999")


def _refuse(key: str, problem: str) -> NoReturn:
    raise InvalidInput(f"recurrence.{key}", problem)


def _iso(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Fire:
    """One line of a preview: the instant in UTC, the same as local ISO text, and what is unusual about it."""

    at: datetime
    local: str
    note: str | None


def preview(recurrence: Recurrence, after: datetime, count: int, schedule_id: ScheduleId) -> list[Fire]:
    """The next `count` fires strictly after `after`, fewer when it ends before: the planner's own walk.

    Local is the cron's zone, or UTC for kinds without one. Raises InvalidInput.
    """
    fires: list[Fire] = []
    while len(fires) < count:
        match recurrence:
            case Cron(expression, timezone):
                step = cron.next_step(expression, timezone, after, schedule_id=schedule_id)
                if step is None:
                    break
                local = step.at.astimezone(zones.load(timezone)).isoformat()
                note = cron.note(step, expression, timezone, schedule_id=schedule_id)
                fires.append(Fire(step.at, local, note))
            case Every() | Once():
                at = next_fire(recurrence, after, schedule_id=schedule_id)
                if at is None:
                    break
                fires.append(Fire(at, at.isoformat(), None))
            case _:
                assert_never(recurrence)
        after = fires[-1].at
    return fires
