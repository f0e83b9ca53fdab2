"""Time zones: which names exist, and which instants a wall-clock time stands for.

Zones are read from the `tzdata` package only, never from the machine: every replica with the same lock file
then has the same rules, whatever its operating system carries (`TZDATA_VERSION` says which).

Where the clock is set forward some wall times never happen (a *gap*); where it is set back some happen twice
(a *fold*). PEP 495 tells them apart: by the offsets of both folds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo

import tzdata  # type: ignore[import-untyped]

from app.errors import InvalidInput

TZDATA_VERSION: str = tzdata.IANA_VERSION
"""The release of the IANA time zone database in use, such as ``2026a``."""

_LONGEST_NAME = 64
_NO_PLACE = frozenset({"Factory"})
"""What the database calls a clock that nobody has set (its file `factory`): chosen, it is a mistake."""
_SECOND = timedelta(seconds=1)
_FIRST = datetime.min.replace(tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)


@cache
def names() -> frozenset[str]:
    """Every zone name there is, spelled exactly as the IANA database spells it; but for `_NO_PLACE`."""
    known = files("tzdata").joinpath("zones").read_text(encoding="ascii").split()
    return frozenset(known) - _NO_PLACE


def load(name: str) -> tzinfo:
    """The zone called `name`. Raises InvalidInput("recurrence.timezone") for anything but an IANA name."""
    if name not in names():
        raise InvalidInput("recurrence.timezone", _unknown(name))
    return _read(name)


@lru_cache(maxsize=1024)
def _read(name: str) -> tzinfo:
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as rules:
        return ZoneInfo.from_file(rules, key=name)


def _unknown(name: str) -> str:
    shown = repr(name[:_LONGEST_NAME]) + ("…" if len(name) > _LONGEST_NAME else "")
    text = f"{shown} is not a time zone; allowed are the exact IANA names, such as 'UTC' or 'Europe/Berlin'"
    meant = [known for known in names() if known.lower() == name[: 2 * _LONGEST_NAME].strip().lower()]
    return f"{text} (did you mean {meant[0]!r}?)" if meant else text


def utc(instant: datetime) -> datetime:
    """`instant` in UTC, the nearest that can be written when that is outside the years 1 to 9999.

    Raises ValueError for a naive one: the machine's own zone is nobody's.
    """
    if instant.tzinfo is None:
        raise ValueError(f"an instant needs a zone: {instant.isoformat()}")
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        return _FIRST if instant.year == 1 else _LAST


def wall(instant: datetime, zone: tzinfo) -> datetime:
    """What the clock on the wall shows at `instant`: naive, `fold` cleared."""
    return instant.astimezone(zone).replace(tzinfo=None, fold=0)


def instants(wall_time: datetime, zone: tzinfo) -> tuple[datetime, ...]:
    """When the clock shows `wall_time` (naive): never (gap), once, or twice (fold), earliest first, in UTC.

    Raises OverflowError when an instant is outside the years 1 to 9999.
    """
    first, second = _offsets(wall_time, zone)
    if first == second:
        return (_at_utc(wall_time - first),)
    if first > second:
        return _at_utc(wall_time - first), _at_utc(wall_time - second)
    return ()


def repeats_after(wall_time: datetime, zone: tzinfo) -> timedelta:
    """How far the clock is set back over `wall_time`: zero unless that wall time happens twice."""
    first, second = _offsets(wall_time, zone)
    return max(first - second, timedelta())


def gap(wall_time: datetime, zone: tzinfo) -> tuple[datetime, timedelta]:
    """For a wall time that never happens: the instant of the jump over it, in UTC, and the jump's length."""
    before, after = _offsets(wall_time, zone)
    if before >= after:
        raise ValueError(f"{wall_time.isoformat()} exists in {zone}")
    # The old offset still holds at `early` and no longer at `late`: halve until the seconds meet.
    early, late = _at_utc(wall_time - after), _at_utc(wall_time - before)
    while late - early > _SECOND:
        middle = early + (late - early) // (2 * _SECOND) * _SECOND
        if middle.astimezone(zone).utcoffset() == before:
            early = middle
        else:
            late = middle
    return late, after - before


def _offsets(wall_time: datetime, zone: tzinfo) -> tuple[timedelta, timedelta]:
    """The offsets of fold 0 and fold 1 (PEP 495): equal, or those before and after a clock change."""
    first = wall_time.replace(tzinfo=zone, fold=0).utcoffset()
    second = wall_time.replace(tzinfo=zone, fold=1).utcoffset()
    assert first is not None
    assert second is not None
    return first, second


def _at_utc(naive: datetime) -> datetime:
    return naive.replace(tzinfo=UTC)
