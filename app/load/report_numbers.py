"""Numbers as people read them, and what is no number."""

from __future__ import annotations

import math
from typing import Any

NOT_MEASURED = "not measured"
KILO = 1000
GREATEST, LEAST = 1e18, 1e-12
"""Beyond these there is nothing that a load run measures; NaN is beyond, too."""


def number(value: Any) -> float | None:
    """The value as a number; None for anything that is not one, or that no measurement can have been."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= GREATEST:
        return None
    return float(value) if abs(value) >= LEAST else 0.0


def plain(value: float) -> str:
    """Three significant digits, whole from a hundred on: 0.0560, 4.21, 37.5, 8,123."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    places = 2 - math.floor(math.log10(size))
    text = f"{value:,.{min(max(places, 0), 9)}f}"
    return text.rstrip("0").rstrip(".") if value == round(value) else text


def count(value: float) -> str:
    """How many: 100,000."""
    return f"{value:,.0f}"


def milliseconds(value: float) -> str:
    """A time: 350 µs, 12.4 ms, 3.25 s, 2 min 50 s."""
    size = abs(value)
    if size < 1 and value:
        return f"{plain(value * KILO)} µs"
    if size < KILO:
        return f"{plain(value)} ms"
    if size < 100 * KILO:
        return f"{plain(value / KILO)} s"
    minutes, seconds = divmod(round(size / KILO), 60)
    return f"{'-' if value < 0 else ''}{minutes} min {seconds:02d} s"


def microseconds(value: float) -> str:
    """CPU time of one run: 230 µs; a thousand and more stay microseconds, so that they can be compared."""
    return f"{plain(value)} µs"


def size_of(value: float) -> str:
    """Bytes: 480 B, 1.8 KB, 24 MB (thousands, not 1024)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < KILO or unit == "GB":
            return f"{plain(value)} {unit}"
        value /= KILO
    raise AssertionError("unreachable")


def tick(value: float) -> str:
    """A label of an axis: 250, 2k, 1.5M."""
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.6g}{name}"
    return f"{value:.6g}"


def time_tick(value: float) -> str:
    """A label of an axis of milliseconds: 0, 50 ms, 2.5 s, 120 s."""
    if value == 0:
        return "0"
    return f"{value / KILO:.6g} s" if abs(value) >= KILO else f"{value:.6g} ms"
