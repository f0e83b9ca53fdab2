"""The cron dialect: what may be written, rewritten into plain numbers that every reader of cron takes alike.

    minute hour day-of-month month day-of-week
    @hourly @daily @midnight @weekly @monthly @yearly @annually

    *  */n  a  a-b  a-b/n  a/n       and lists of these; names JAN..DEC and SUN..SAT
    L                                the last day of the month
    a#n                              the n-th weekday of the month
    H  H/n  H(a-b)  H(a-b)/n         a value hashed from the schedule's id

The rewriting keeps what decides a field's meaning in classic cron, whether it *begins* with a star, and
settles the rest: names become numbers, `22-2` becomes `22-23,0-2`, `FRI-SUN` becomes `5-7`, `H` its number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

from app.domain.ids import ScheduleId
from app.errors import InvalidInput

LONGEST = 256
"""Characters. Any useful expression is far shorter, and a list of 200,000 items takes seconds to read."""

MACROS: Mapping[str, str] = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One of the five places: its lowest and highest value, the highest value `H` chooses, and its names."""

    name: str
    low: int
    high: int
    highest_hashed: int
    names: Mapping[str, int] = field(default_factory=dict)


def _numbered(words: str, first: int) -> dict[str, int]:
    return {word: number for number, word in enumerate(words.split(), first)}


MINUTE = Field("minute", 0, 59, 59)
HOUR = Field("hour", 0, 23, 23)
# `H` stays within 1..28, so that a hashed day exists in every month.
DAY = Field("day-of-month", 1, 31, 28)
MONTH = Field("month", 1, 12, 12, _numbered("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1))
WEEKDAY = Field("day-of-week", 0, 7, 6, _numbered("SUN MON TUE WED THU FRI SAT", 0))
FIELDS = (MINUTE, HOUR, DAY, MONTH, WEEKDAY)

_WRITABLE = re.compile(r"[A-Za-z0-9*,/#()@? \t-]*")
_USES_HASH = re.compile(r"(?:^|[\s,])h(?=$|[\s,(/])", re.IGNORECASE)
_STAR = re.compile(r"\*(?:/(?P<step>[0-9]+))?")
_HASH = re.compile(r"H(?:\((?P<low>[0-9]+)-(?P<high>[0-9]+)\))?(?:/(?P<step>[0-9]+))?")
_NTH = re.compile(r"(?P<day>[0-9A-Z]+)#(?P<nth>[0-9]+)")
_SPAN = re.compile(r"(?P<low>[0-9A-Z]+)(?:-(?P<high>[0-9A-Z]+))?(?:/(?P<step>[0-9]+))?")
_KNOWN_ELSEWHERE = (
    (
        re.compile(r"R(?:\(.*\))?(?:/.*)?"),
        "'R' (random) is not supported: use H, which is stable for a schedule",
    ),
    (re.compile(r"LW|[0-9]+W|W[0-9]*"), "'W' (nearest working day) is not supported"),
    (re.compile(r"[0-7A-Z]+L|L[0-9]+"), "the last given weekday of a month is not supported; a#n is"),
    (re.compile(r"L-[0-9]+"), "counting days back from 'L' is not supported"),
    (re.compile(r"\?.*"), "'?' is not supported: write *"),
)
_WHY_NOT_MORE = " (seconds and years are not supported: cron programs disagree where they stand)"


def plain(expression: str, schedule_id: ScheduleId) -> str:
    """`expression` as five fields of numbers, stars and `L`; names, case and spacing make no difference.

    `schedule_id` decides what `H` stands for and nothing else. Raises InvalidInput("recurrence.cron").
    """
    if not isinstance(expression, str):
        refuse("is not text")
    if len(expression) > LONGEST:
        refuse(f"is {len(expression)} characters long; at most {LONGEST} are allowed")
    return _plain(expression, schedule_id.bytes if uses_hash(expression) else b"")


def uses_hash(expression: str) -> bool:
    """True when `expression` depends on the schedule's id. `THU` and `MARCH` do not."""
    return _USES_HASH.search(expression) is not None


@lru_cache(maxsize=8192)
def _plain(expression: str, seed: bytes) -> str:
    if not _WRITABLE.fullmatch(expression):
        strange = next(character for character in expression if not _WRITABLE.fullmatch(character))
        refuse(f"{strange!r} has no meaning in a cron expression (a zone goes into recurrence.timezone)")
    text = expression.strip().upper()
    if text.startswith("@"):
        text = MACROS.get(text.lower()) or refuse(_unknown_macro(text.lower()))
    parts = text.split()
    if len(parts) != len(FIELDS):
        why = _WHY_NOT_MORE if len(parts) > len(FIELDS) else ""
        refuse(f"has {len(parts)} fields; it must have 5: {' '.join(place.name for place in FIELDS)}{why}")
    if "#" in parts[4] and parts[2] != "*":
        refuse(
            "day-of-week: an n-th weekday (a#n) needs * as day-of-month; cron programs disagree on the mix"
        )
    if "#" in parts[4] and not all("#" in item for item in parts[4].split(",")):
        refuse("day-of-week: n-th weekdays (a#n) and plain weekdays cannot share a list")
    return " ".join(
        ",".join(_item(item, place, seed) for item in part.split(","))
        for part, place in zip(parts, FIELDS, strict=True)
    )


def refuse(problem: str) -> NoReturn:
    """Raise InvalidInput for the whole expression."""
    raise InvalidInput("recurrence.cron", problem)


def _refuse(place: Field, problem: str) -> NoReturn:
    refuse(f"{place.name}: {problem}")


def _item(item: str, place: Field, seed: bytes) -> str:
    """One list item of one field, rewritten."""
    if star := _STAR.fullmatch(item):
        return item if star["step"] is None else f"*/{_step(star['step'], place)}"
    if item == "L" and place is DAY:
        return item
    if hashed := _HASH.fullmatch(item):
        return _hashed(hashed, place, seed)
    if (nth := _NTH.fullmatch(item)) and place is WEEKDAY:
        if not 1 <= int(nth["nth"]) <= 5:
            _refuse(place, f"in {item!r} the number after # must be 1 to 5")
        return f"{_value(nth['day'], place) % 7}#{int(nth['nth'])}"
    for pattern, problem in _KNOWN_ELSEWHERE:
        if pattern.fullmatch(item) and item not in place.names:
            _refuse(place, problem)
    if span := _SPAN.fullmatch(item):
        return _spanned(span, place)
    _refuse(
        place, f"{item!r} is not understood; allowed are *, numbers, ranges a-b, steps /n and lists of them"
    )


def _unknown_macro(text: str) -> str:
    hint = "; for an interval use the kind 'every' with every_seconds" if text.startswith("@every") else ""
    return f"{text} is not one of {' '.join(MACROS)}{hint}"


def _spanned(span: re.Match[str], place: Field) -> str:
    low = _value(span["low"], place)
    if span["high"] is None:
        return f"{low}" if span["step"] is None else f"{low}/{_step(span['step'], place)}"
    high = _value(span["high"], place)
    if span["step"] is None:
        return _range(low, high, place)
    step = _step(span["step"], place)
    if low >= high:
        _refuse(
            place, f"{span[0]!r}: a step needs a range that goes up; cron programs disagree on anything else"
        )
    return f"{low}-{high}/{step}"


def _range(low: int, high: int, place: Field) -> str:
    """A range without a step; one that wraps is cut in two where the field ends."""
    if place is WEEKDAY and low == 7:
        low, high = 0, high % 7
    if place is WEEKDAY and high == 0 and low > 0:
        high = 7
    if low == high:
        return f"{low}"
    if low < high:
        return f"{low}-{high}"
    last = 6 if place is WEEKDAY else place.high
    return f"{_range(low, last, place)},{_range(place.low, high, place)}"


def _hashed(hashed: re.Match[str], place: Field, seed: bytes) -> str:
    low, high = place.low, place.highest_hashed
    if hashed["low"] is not None:
        low, high = _value(hashed["low"], place), _value(hashed["high"], place)
        if low > high:
            _refuse(place, f"{hashed[0]!r}: the range of H must go up")
    digest = hashlib.sha256(seed + place.name.encode()).digest()
    draw = int.from_bytes(digest[:8], "big")
    span = high - low + 1
    if hashed["step"] is None:
        return f"{low + draw % span}"
    step = _step(hashed["step"], place)
    if step > span:
        _refuse(place, f"{hashed[0]!r}: the step must be at most {span}")
    first = low + draw % step
    return f"{first}" if first + step > high else f"{first}-{high}/{step}"


def _value(text: str, place: Field) -> int:
    """A number or name as the number it stands for; Sunday may be 0 or 7."""
    if text in place.names:
        return place.names[text]
    if not text.isdecimal():
        known = f" or one of {' '.join(place.names)}" if place.names else ""
        _refuse(place, f"{text!r} is not a number{known}")
    if not place.low <= int(text) <= place.high:
        _refuse(place, f"{int(text)} is outside {place.low} to {place.high}")
    return int(text)


def _step(text: str, place: Field) -> int:
    if int(text) == 0:
        _refuse(place, "a step must be at least 1")
    return int(text)
