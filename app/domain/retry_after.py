"""Reading `Retry-After` (RFC 9110, section 10.2.3): when a target asks us to come back, or nothing.

Only what the standard allows is read. A sign, a fraction, an exponent, another script's digits or two
different fields mean that nothing was asked, and the caller's own backoff applies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

LONGEST = timedelta(hours=24)
"""No target keeps a run longer than this by asking; larger requests count as this."""

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
_CLOCK = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})"
# RFC 9110, section 5.6.7: IMF-fixdate, RFC 850, asctime. The weekday is not checked against the date.
_FORMS = (
    re.compile(
        rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_CLOCK} GMT"
    ),
    re.compile(
        r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, "
        rf"(?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_CLOCK} GMT"
    ),
    re.compile(
        rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_MONTH} (?P<day>[0-9 ][0-9]) {_CLOCK} (?P<year>[0-9]{{4}})"
    ),
)


def asked_delay(headers: Sequence[tuple[str, str]], now: datetime) -> timedelta | None:
    """How long the answer with these header fields asks us to wait, from 0 to `LONGEST`; None when it does
    not ask.

    A date is measured against the answer's own `Date` where it has one, so a target whose clock is off is
    still understood; a date that has passed asks for nothing.
    """
    values = {value for name, value in headers if name.lower() == "retry-after"}
    if len(values) != 1:
        return None
    value = values.pop()
    if re.fullmatch(r"[0-9]+", value):
        digits = value.lstrip("0") or "0"
        seconds = int(digits) if len(digits) <= 9 else 10**9
        return min(timedelta(seconds=seconds), LONGEST)
    at = parse_http_date(value, now)
    if at is None:
        return None
    dates = [value for name, value in headers if name.lower() == "date"]
    sent_at = parse_http_date(dates[0], now) if len(dates) == 1 else None
    delay = at - (sent_at or now)
    return min(delay, LONGEST) if delay > timedelta(0) else None


def parse_http_date(text: str, now: datetime) -> datetime | None:
    """The instant of an HTTP-date in any of its three forms, or None. `now` resolves two-digit years."""
    for form in _FORMS:
        match = form.fullmatch(text)
        if match is not None:
            break
    else:
        return None
    year = int(match["year"])
    if len(match["year"]) == 2:
        # "more than 50 years in the future" means the most recent past year with these digits.
        year += now.year - now.year % 100
        year -= 100 if year > now.year + 50 else 0
    try:
        return datetime(
            year,
            _MONTHS[match["month"]],
            int(match["day"]),
            int(match["hour"]),
            int(match["minute"]),
            min(int(match["second"]), 59),  # a leap second is written 60
            tzinfo=UTC,
        )
    except ValueError:
        return None
