"""The report's drawings: the lateness curve, what happened over time, where the CPU time went."""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.load.report_charts import Axis, Line, Spot, line_chart, nice_axis, stacked_bars
from app.load.report_charts import legend as colours
from app.load.report_html import Html, join, tag
from app.load.report_numbers import number, tick, time_tick
from app.load.report_run import Run
from app.load.report_tables import cpu_table, lateness_table, section
from app.load.report_words import CPU_PARTS, LATENESS

PERCENTILE_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 99.9999)
MOST_BINS = 180
FLOWS = ("planned", "delivered", "recorded")
BINS_MS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 60_000, 300_000, 3_600_000)


def lateness(runs: Sequence[Run]) -> Html:
    """The curve on a percentile axis, and the table of percentiles."""
    curves = [_curve(run) for run in runs]
    lines = [
        Line(run.name, curve, place)
        for place, (run, curve) in enumerate(zip(runs, curves, strict=True))
        if curve
    ]
    if not lines and not any(run.number("lateness_ms", key) is not None for run in runs for key in LATENESS):
        return section("How late", _nothing("Not measured in this scenario."))
    drawn = _lateness_chart(lines) if lines else _nothing("There is no curve.")
    note = (
        "First byte at the target minus the instant it was due, by the database's clock. To read the curve: at 99 %"
        " stands how late 99 of 100 deliveries were at most; the axis stretches towards the last ones."
    )
    return section("How late", drawn, lateness_table(runs), note=note)


def over_time(runs: Sequence[Run]) -> Html:
    """Throughput of each run, and the backlog of all."""
    series = {run.name: timeline for run in runs if (timeline := Timeline.of(run)) is not None}
    if not series:
        return section("Over time", _nothing("Not recorded in this scenario."))
    fastest = max((max(flow) for each in series.values() for flow in each.flows.values()), default=0.0)
    drawn: list[Html] = []
    for name, timeline in series.items():
        if len(runs) > 1:
            drawn.append(tag("h3", name))
        drawn.append(timeline.chart(fastest))
    drawn += _backlog(list(series.items()))
    step = max(each.bin_ms for each in series.values())
    return section(
        "Over time", *drawn, note=f"Runs a second, in steps of {time_tick(step)}; 0 is the instant."
    )


def cpu(runs: Sequence[Run]) -> Html:
    """CPU microseconds per run by part."""
    rows = []
    for run in runs:
        spent = [
            (name, run.number("cpu_us_per_run", part), place)
            for place, (part, name) in enumerate(CPU_PARTS.items())
        ]
        parts = [(name, size, place) for name, size, place in spent if size]
        if parts:
            rows.append((run.name, parts))
    if not rows:
        return section("Where the CPU time goes", _nothing("Not measured in this scenario."))
    shown = {place: name for _, parts in rows for name, _, place in parts}
    told = "; ".join(
        f"{name}: " + ", ".join(f"{part} {size:.0f} µs" for part, size, _ in parts) for name, parts in rows
    )
    bars = stacked_bars(rows, told=f"CPU time per run. {told}", unit="µs per run")
    key = colours([(shown[place], place) for place in sorted(shown)])
    note = "User and system time of the processes, from /proc, divided by the runs. The target is not Carillon's cost."
    return section("Where the CPU time goes", key, bars, cpu_table(runs), note=note)


class Timeline:
    """A run's series, in bins wide enough to be drawn."""

    def __init__(
        self, begin_ms: float, bin_ms: int, flows: dict[str, list[float]], backlog: list[float]
    ) -> None:
        self.begin_ms, self.bin_ms = begin_ms, bin_ms
        self.flows, self.backlog = flows, backlog

    @classmethod
    def of(cls, run: Run) -> Timeline | None:
        """None when the run has no series that can be read."""
        step = run.number("series", "step_ms")
        columns = {name: run.numbers("series", name) for name in (*FLOWS, "backlog")}
        length = max((len(column) for column in columns.values()), default=0)
        if step is None or step < 1 or not length:
            return None
        wanted = step * length / MOST_BINS
        bin_ms = next(
            (size for size in BINS_MS if size >= wanted and size % step == 0),
            math.ceil(wanted / step) * int(step),
        )
        per_bin = max(1, round(bin_ms / step))
        flows = {
            name: [sum(columns[name][at : at + per_bin]) * 1000 / bin_ms for at in range(0, length, per_bin)]
            for name in FLOWS
            if any(columns[name])
        }
        backlog = columns["backlog"]
        lasts = [backlog[min(at + per_bin, len(backlog)) - 1] for at in range(0, len(backlog), per_bin)]
        return cls(run.number("series", "begin_ms") or 0.0, int(bin_ms), flows, lasts if any(backlog) else [])

    def middles(self, values: Sequence[float]) -> list[tuple[float, float]]:
        """Points (seconds since the instant, value), each in the middle of its bin."""
        return [((self.begin_ms + (at + 0.5) * self.bin_ms) / 1000, value) for at, value in enumerate(values)]

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end in seconds."""
        length = max([len(self.backlog), *(len(flow) for flow in self.flows.values())])
        return self.begin_ms / 1000, (self.begin_ms + length * self.bin_ms) / 1000

    def chart(self, fastest: float) -> Html:
        """Throughput; `fastest` is the greatest rate of all runs, so that they have one scale."""
        lines = [
            Line(name, _busy(self.middles(flow)), FLOWS.index(name)) for name, flow in self.flows.items()
        ]
        x, y = _seconds(*self.span), nice_axis("", 0, fastest, tick)
        told = "Runs a second over time. " + ", ".join(
            f"{name}: at most {max(flow):,.0f} a second" for name, flow in self.flows.items()
        )
        return line_chart(lines, x, y, told=told, spots=self._spots(), mark=_instant(*self.span))

    def _spots(self) -> list[Spot]:
        length = max((len(flow) for flow in self.flows.values()), default=0)
        spots: list[Spot] = []
        for at in range(length):
            begin = (self.begin_ms + at * self.bin_ms) / 1000
            told = ", ".join(f"{name} {flow[at]:,.0f}/s" for name, flow in self.flows.items())
            spots.append(Spot(begin, begin + self.bin_ms / 1000, f"{begin:+.1f} s: {told}"))
        return spots


def _busy(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the zeros before the first and behind the last that is none, but for one on each side."""
    busy = [at for at, (_, value) in enumerate(points) if value]
    return list(points[max(0, busy[0] - 1) : busy[-1] + 2]) if busy else []


def _backlog(series: Sequence[tuple[str, Timeline]]) -> list[Html]:
    """Of those runs that were to be recorded at all."""
    drawn = [
        (name, each, place)
        for place, (name, each) in enumerate(series)
        if each.backlog and "recorded" in each.flows
    ]
    if not drawn:
        return []
    lines = [Line(name, each.middles(each.backlog), place) for name, each, place in drawn]
    begin, end = min(each.span[0] for _, each, _ in drawn), max(each.span[1] for _, each, _ in drawn)
    most = max(max(each.backlog) for _, each, _ in drawn)
    told = "Backlog over time. " + ", ".join(
        f"{name}: at most {max(each.backlog):,.0f}" for name, each, _ in drawn
    )
    y = nice_axis("", 0, most, tick)
    x, mark = _seconds(begin, end), _instant(begin, end)
    chart = line_chart(lines, x, y, told=told, mark=mark, filled=len(lines) == 1)
    return [tag("h3", "Backlog: due and not yet recorded"), chart]


def _curve(run: Run) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for each in run.items("lateness_curve"):
        if isinstance(each, list | tuple) and len(each) == 2:
            percentile, late = number(each[0]), number(each[1])
            if percentile is not None and late is not None and 0 <= percentile <= 100:
                points.append((percentile, late))
    return sorted(points)


def _lateness_chart(lines: Sequence[Line]) -> Html:
    levels = [percentile for line in lines for percentile, _ in line.points if percentile < 100]
    deepest = max(levels, default=90.0)
    shown = [at for at in PERCENTILE_TICKS if at <= max(deepest, 90.0)]
    high = max(deepest, shown[-1])
    x = Axis("of deliveries were at most so late", 0.0, high, [(at, f"{at:g} %") for at in shown], _stretched)
    late = [value for line in lines for _, value in line.points]
    y = nice_axis("", min(0.0, *late), max(late), time_tick)
    told = "Lateness by percentile. " + "; ".join(
        f"{line.name}: at most {time_tick(line.points[-1][1])}" for line in lines
    )
    ends = [
        Line(line.name, [(min(at, high), value) for at, value in line.points], line.slot) for line in lines
    ]
    return line_chart(ends, x, y, told=told)


def _stretched(percentile: float) -> float:
    """Each further nine takes the same room."""
    return -math.log10(1 - min(percentile, 99.9999999) / 100)


def _seconds(begin: float, end: float) -> Axis:
    axis = nice_axis("seconds since the instant", begin, end, lambda value: f"{value:g}", about=8)
    inside = [(at, label) for at, label in axis.ticks if begin <= at <= end]
    return Axis(axis.name, begin, end, inside)


def _instant(begin: float, end: float) -> tuple[float, str] | None:
    return (0.0, "due") if begin < 0 < end else None


def _nothing(why: str) -> Html:
    return join(tag("p", why, class_="none"))
