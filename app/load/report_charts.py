"""Charts as inline SVG: lines over an axis, and stacked bars. No scripts; what is under the pointer is told by titles.

A drawing is 720 units wide and scales with the page. Colours are classes (`s1` … `s6`), so that the style sheet decides
about light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.load.report_html import Html, join, tag

WIDTH, HEIGHT = 720, 310
LEFT, RIGHT, TOP, BOTTOM = 70, 18, 24, 46
SLOTS = 6
"""How many colours there are; further lines begin again, with another dash."""

Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its points in the order of x. `slot` chooses the colour, from 0."""

    name: str
    points: Sequence[tuple[float, float]]
    slot: int


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high` in the units of the points, with labelled ticks. `place` bends it (a logarithm, say)."""

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    place: Place = float


@dataclass(frozen=True, slots=True)
class Spot:
    """Something to be told under the pointer, from one x to the next."""

    begin: float
    end: float
    text: str


def nice_axis(name: str, low: float, high: float, label: Callable[[float], str], *, about: int = 5) -> Axis:
    """An axis with round ticks that covers both ends; one of no length is widened."""
    span = high - low if high > low else 1.0
    step = _nice_step(span / about)
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    ticks = [(place * step, label(place * step)) for place in range(first, last + 1)]
    return Axis(name, first * step, last * step, ticks)


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    told: str,
    spots: Sequence[Spot] = (),
    mark: tuple[float, str] | None = None,
    filled: bool = False,
) -> Html:
    """Lines in one frame, with a legend when there are several. `told` is for those who cannot see it.

    `mark` is an x with a word, drawn as a vertical line.
    """
    across, up = _placing(x, LEFT, WIDTH - RIGHT), _placing(y, HEIGHT - BOTTOM, TOP)
    drawn = [
        *_grid(x, y, across, up),
        *([_mark(across(mark[0]), mark[1])] if mark else []),
        *(_path(line, across, up, filled=filled) for line in lines),
        *(_spot(spot, across) for spot in spots),
    ]
    svg = tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=told)
    return join(legend([(line.name, line.slot) for line in lines]) if len(lines) > 1 else None, svg)


def legend(names: Sequence[tuple[str, int]]) -> Html:
    """Which colour is what."""
    items = [tag("li", tag("span", class_=f"swatch s{slot % SLOTS + 1}"), name) for name, slot in names]
    return tag("ul", *items, class_="legend")


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, int]]]], *, told: str, unit: str
) -> Html:
    """One bar for each row, its parts (name, size, colour) one after the other, all to one scale."""
    longest = max((sum(size for _, size, _ in parts) for _, parts in rows), default=0.0) or 1.0
    bar, gap = 30, 34
    height = len(rows) * (bar + gap) + 4
    pieces: list[Html] = []
    for row, (name, parts) in enumerate(rows):
        top = row * (bar + gap) + gap - 4
        whole = sum(size for _, size, _ in parts)
        pieces.append(tag("text", f"{name}: {whole:,.0f} {unit}", x=0.0, y=top - 8.0, class_="bar-name"))
        begin = 0.0
        for part, size, slot in parts:
            width = size / longest * WIDTH
            title = tag("title", f"{name}, {part}: {size:,.1f} {unit}")
            rect = {"x": begin, "y": float(top), "width": max(0.0, width - 2), "height": float(bar)}
            pieces.append(tag("rect", title, class_=f"fill s{slot % SLOTS + 1}", rx=2.0, **rect))
            if width > 8.5 * len(f"{size:.0f}") + 14:
                middle = {"x": begin + width / 2, "y": top + bar / 2 + 4.5}
                pieces.append(tag("text", f"{size:,.0f}", class_="on-bar", text_anchor="middle", **middle))
            begin += width
    return tag("svg", *pieces, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=told)


def _nice_step(about: float) -> float:
    unit = 10.0 ** math.floor(math.log10(about))
    return next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= about * 0.999)


def _placing(axis: Axis, begin: float, end: float) -> Place:
    low, high = axis.place(axis.low), axis.place(axis.high)
    scale = (end - begin) / ((high - low) or 1.0)
    return lambda value: begin + (min(max(axis.place(value), low), high) - low) * scale


def _grid(x: Axis, y: Axis, across: Place, up: Place) -> list[Html]:
    pieces: list[Html] = []
    for value, label in y.ticks:
        at = up(value)
        pieces.append(tag("line", class_="grid", x1=float(LEFT), x2=float(WIDTH - RIGHT), y1=at, y2=at))
        pieces.append(tag("text", label, x=LEFT - 8.0, y=at + 4, text_anchor="end"))
    bottom = float(HEIGHT - BOTTOM)
    for place, (value, label) in enumerate(x.ticks):
        at = across(value)
        pieces.append(tag("line", class_="tick", x1=at, x2=at, y1=bottom, y2=bottom + 5))
        minor = "minor" if place % 2 else None
        pieces.append(tag("text", label, x=at, y=bottom + 18, text_anchor="middle", class_=minor))
    pieces.append(tag("line", class_="base", x1=float(LEFT), x2=float(WIDTH - RIGHT), y1=bottom, y2=bottom))
    middle = (LEFT + WIDTH - RIGHT) / 2
    pieces.append(tag("text", x.name, x=middle, y=HEIGHT - 8.0, text_anchor="middle", class_="axis"))
    return pieces


def _path(line: Line, across: Place, up: Place, *, filled: bool) -> Html:
    if not line.points:
        return Html("")
    steps = [f"{across(x):.1f} {up(y):.1f}" for x, y in line.points]
    kind = f"line s{line.slot % SLOTS + 1}{' again' if line.slot >= SLOTS else ''}"
    drawn = tag("path", class_=kind, d="M" + "L".join(steps))
    if not filled:
        return drawn
    first, last, floor = across(line.points[0][0]), across(line.points[-1][0]), up(0.0)
    shape = f"M{first:.1f} {floor:.1f}L" + "L".join(steps) + f"L{last:.1f} {floor:.1f}Z"
    return join(tag("path", class_=f"area s{line.slot % SLOTS + 1}", d=shape), drawn)


def _mark(at: float, word: str) -> Html:
    line = tag("line", class_="mark", x1=at, x2=at, y1=float(TOP), y2=float(HEIGHT - BOTTOM))
    return join(line, tag("text", word, x=at, y=TOP - 5.0, text_anchor="middle"))


def _spot(spot: Spot, across: Place) -> Html:
    begin, end = across(spot.begin), across(spot.end)
    frame = {
        "x": begin,
        "y": float(TOP),
        "width": max(0.5, end - begin),
        "height": float(HEIGHT - BOTTOM - TOP),
    }
    return tag("rect", tag("title", spot.text), class_="spot", **frame)
