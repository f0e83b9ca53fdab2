"""The report's tables: a row for each figure, a column for each run. What was not measured is said to be so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.load.report_html import Html, tag
from app.load.report_numbers import NOT_MEASURED, microseconds, number, plain, size_of
from app.load.report_run import DISTRIBUTION, Run, is_distribution
from app.load.report_words import COSTS, CPU_PARTS, LATENESS, ONCE, RATES, Word, word_for

NOT_RECORDED = "not recorded"


def section(title: str, *content: Html | str | None, note: str | None = None) -> Html:
    """A part of the page with its heading, and a sentence on how to read it."""
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else None, *content)


def figures_table(runs: Sequence[Run], rows: Sequence[tuple[Word, Sequence[str]]]) -> Html:
    """Rows of (word, path), with the ratio to the first run where there are several."""
    body: list[Html] = []
    for word, path in rows:
        values = [run.number(*path) for run in runs]
        cells = [_cell(word, value, values[0] if place else None) for place, value in enumerate(values)]
        body.append(tag("tr", _row_head(word.label, word.meaning), *cells))
    return _table(runs, body)


def exactly_once(runs: Sequence[Run]) -> Html:
    """Expected, delivered, recorded, duplicate, missing; what is wrong is marked with more than a colour."""
    if not any(run.number(key) is not None for run in runs for key in ONCE):
        return section("Exactly once", tag("p", "Not measured in this scenario.", class_="none"))
    body: list[Html] = []
    for key, word in ONCE.items():
        cells: list[Html] = []
        for run in runs:
            value, expected = run.number(key), run.number("expected")
            wrong = bool(value) if key in ("duplicates", "missing") else _falls_short(key, value, expected)
            cells.append(_cell(word, value, None, wrong=wrong))
        body.append(tag("tr", _row_head(word.label, word.meaning), *cells))
    return section(
        "Exactly once",
        _table(runs, body),
        note="Counted at the target, by delivery id, and in the database; never in the executors.",
    )


def lateness_table(runs: Sequence[Run]) -> Html:
    """The percentiles."""
    return figures_table(runs, [(word, ("lateness_ms", key)) for key, word in LATENESS.items()])


def cpu_table(runs: Sequence[Run]) -> Html:
    """CPU time per run by part."""
    meaning = "everything that was measured, with the target"
    rows = [(Word("together", microseconds, meaning), ("cpu_us_per_run", "total"))]
    rows += [(Word(name, microseconds), ("cpu_us_per_run", part)) for part, name in CPU_PARTS.items()]
    return figures_table(runs, rows)


def rates_and_costs(runs: Sequence[Run]) -> Html:
    """How fast, and what it costs besides CPU time. The rate that a scenario has not is left out."""
    rates = {key: word for key, word in RATES.items() if any(run.number(key) is not None for run in runs)}
    words = {**(rates or {"recorded_per_s": RATES["recorded_per_s"]}), **COSTS}
    return section("Speed and cost", figures_table(runs, [(word, (key,)) for key, word in words.items()]))


def own_figures(runs: Sequence[Run]) -> Html | None:
    """What only this scenario measures."""
    found: dict[str, list[Any]] = {}
    for place, run in enumerate(runs):
        for key, value in run.own():
            found.setdefault(key, [None] * len(runs))[place] = value
    if not found:
        return None
    body = [
        tag(
            "tr",
            _row_head(word_for(key).label, word_for(key).meaning),
            *(_own_cell(key, each) for each in values),
        )
        for key, values in found.items()
    ]
    return section("This scenario's own figures", _table(runs, body))


def repetitions(runs: Sequence[Run]) -> Html | None:
    """Each repetition by itself: the spread is part of the figure."""
    body: list[Html] = []
    words = {**RATES, **{f"lateness_ms.{key}": LATENESS[key] for key in ("p50", "p99")}}
    words["cpu_us_per_run.total"] = Word("CPU per run", microseconds)
    for run in runs:
        repeats = [Run(run.name, each) for each in run.items("repeats") if isinstance(each, Mapping)]
        for key, word in words.items():
            values = [value for each in repeats if (value := each.number(*key.split("."))) is not None]
            if len(values) > 1:
                label = f"{run.name}: {word.label}" if len(runs) > 1 else word.label
                told = ", ".join(word.write(value) for value in values)
                spread = f"{word.write(min(values))} to {word.write(max(values))}"
                body.append(
                    tag("tr", _row_head(label, ""), tag("td", spread), tag("td", told, class_="each"))
                )
    if not body:
        return None
    head = tag(
        "thead", tag("tr", tag("td"), tag("th", "from, to", scope="col"), tag("th", "each", scope="col"))
    )
    note = "The figures above are medians of these; of losses and duplicates the worst counts."
    return section("Repetitions", _scroll(tag("table", head, tag("tbody", *body))), note=note)


def measured_on(runs: Sequence[Run]) -> Html:
    """Machine, versions, settings. Of several runs, what they share is told once and marked where it differs."""
    parts = [
        (
            "The machine and the run",
            _env(runs, ("versions", "server_settings", "replica_settings", "arguments")),
        ),
        ("Versions", _env(runs, (), "versions")),
        ("PostgreSQL's settings", _env(runs, (), "server_settings")),
        ("Carillon's settings", _env(runs, (), "replica_settings")),
    ]
    blocks = [
        tag("details", tag("summary", title), content, open="" if place == 0 else None)
        for place, (title, content) in enumerate(parts)
    ]
    return section("Measured on", *blocks, note=_durability(runs))


def _durability(runs: Sequence[Run]) -> str:
    told: list[str] = []
    for run in runs:
        settings = run.group("env", "server_settings")
        stated = [
            f"{name} {settings[name]}"
            for name in ("fsync", "full_page_writes", "synchronous_commit")
            if isinstance(settings.get(name), str)
        ]
        told.append(", ".join(stated) if stated else "the server's settings are not known")
    if len(set(told)) == 1:
        return f"Durability: {told[0]}."
    return " ".join(f"Durability of {run.name}: {each}." for run, each in zip(runs, told, strict=True))


def _env(runs: Sequence[Run], without: Sequence[str], *path: str) -> Html:
    found: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        for key, value in run.group("env", *path).items():
            if key not in without:
                found.setdefault(str(key), [NOT_RECORDED] * len(runs))[place] = _setting(str(key), value)
    if not found:
        return tag("p", "Not recorded.", class_="none")
    body = []
    for key, values in found.items():
        differs = len(set(values)) > 1
        cells = [tag("td", value, class_="text") for value in values]
        body.append(tag("tr", _row_head(key.replace("_", " "), "differs" if differs else ""), *cells))
    return _table(runs, body)


def _setting(key: str, value: Any) -> str:
    if value is None:
        return "none"
    size = number(value) if key.endswith("_bytes") else None
    return _told(value) if size is None else size_of(size)


def _told(value: Any) -> str:
    match value:
        case None:
            return NOT_MEASURED
        case list() | tuple():
            return ", ".join(_told(each) for each in value) or "none"
        case Mapping():
            return ", ".join(f"{key} {_told(each)}" for key, each in value.items())
        case float() if number(value) is not None:
            return plain(value)
        case _:
            return str(value)


def _table(runs: Sequence[Run], body: Sequence[Html]) -> Html:
    heads = [tag("th", run.name, scope="col") for run in runs]
    head = tag("thead", tag("tr", tag("td"), *heads)) if len(runs) > 1 else None
    return _scroll(tag("table", head, tag("tbody", *body)))


def _scroll(table: Html) -> Html:
    return tag("div", table, class_="scroll")


def _row_head(label: str, meaning: str) -> Html:
    return tag("th", label, tag("small", meaning) if meaning else None, scope="row")


def _cell(word: Word, value: float | None, first: float | None, *, wrong: bool = False) -> Html:
    if value is None:
        return tag("td", NOT_MEASURED, class_="none")
    ratio = tag("small", f"{plain(value / first)} ×") if first else None
    return tag("td", "✗ " if wrong else None, word.write(value), ratio, class_="wrong" if wrong else "number")


def _own_cell(key: str, value: Any) -> Html:
    if (found := number(value)) is not None:
        return _cell(word_for(key), found, None)
    if is_distribution(value):
        return _distribution(key, value)
    if isinstance(value, list | tuple):
        write = word_for(key).write
        told = [_told(each) if number(each) is None else write(float(each)) for each in value]
        return tag("td", ", ".join(told) or "none", class_="number")
    return tag(
        "td",
        {True: "yes", False: "no"}.get(value, _told(value)),
        class_="none" if value is None else "number",
    )


def _distribution(key: str, value: Mapping[str, Any]) -> Html:
    """Percentiles of one thing in one cell: p50 8.5 ms, p90 …"""
    write = word_for(key).write
    told = [
        f"{LATENESS[name].meaning} {write(at)}"
        for name in DISTRIBUTION
        if (at := number(value.get(name))) is not None
    ]
    if (many := number(value.get("count"))) is not None:
        told.append(f"of {many:,.0f}")
    return tag("td", *(tag("span", each) for each in told), class_="spread") if told else _own_cell(key, None)


def _falls_short(key: str, value: float | None, expected: float | None) -> bool:
    return key != "expected" and value is not None and expected is not None and value != expected
