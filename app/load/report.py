"""`report.html`: a load run, or several side by side, as one page that needs nothing but itself.

    write(folder / "report.html", summary)      # the content of summary.json, or of a comparison (`runs`)

No scripts, no requests; light, dark and paper; wide tables scroll inside themselves. A figure that a summary does not
have is said to be missing, never guessed. Everything in a summary is data: it is escaped (`app.load.report_html`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.load import report_curves, report_tables
from app.load.report_html import Html, join, tag
from app.load.report_numbers import count, microseconds, milliseconds, number, plain, size_of
from app.load.report_run import Run, runs_of
from app.load.report_words import per_second, percent, times

STYLE = Path(__file__).with_name("report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the browser may do: show this page and nothing else, even if something slipped through."""

TITLES: Mapping[str, str] = {
    "burst": "everything due at one instant",
    "steady": "a steady rate",
    "fairness": "one tenant's burst among quiet ones",
    "claims": "claim and settle, without HTTP",
    "planner": "the planner alone",
    "slow": "slow targets",
    "horizon": "a burst under a held snapshot",
    "history": "reading a long history",
}

TILES: Mapping[str, Sequence[tuple[str, str, Any]]] = {
    "claims": (("claim_settle_per_s", "claimed and settled", per_second),),
    "planner": (("planned_per_s", "planned", per_second),),
    "steady": (
        ("lateness_ms.p99", "late at most, 99 %", milliseconds),
        ("idle_cpu_percent", "of a core, idle", percent),
    ),
    "fairness": (
        ("quiet.burst_p99_ms", "quiet p99 during the burst", milliseconds),
        ("quiet.ratio", "of solo", times),
    ),
    "horizon": (("ratio", "of the speed without", times),),
    "history": (("page_p99_ms", "a page, p99", milliseconds), ("run_p99_ms", "one run, p99", milliseconds)),
    "slow": (("most_in_flight", "in flight", count), ("memory_bytes_per_run_in_flight", "each", size_of)),
}
ABOUT: Mapping[str, Sequence[tuple[str, Any, str]]] = {
    "claims": (("claim_settle_per_s", per_second, "{} claimed and settled"),),
    "planner": (("planned_per_s", per_second, "{} planned"),),
    "steady": (("lateness_ms.p99", milliseconds, "99 % of them at most {} late"),),
    "fairness": (("quiet.burst_p99_ms", milliseconds, "the quiet tenants' p99 is {} during the burst"),),
    "horizon": (("ratio", times, "{} the speed without a held snapshot"),),
    "history": (("page_p99_ms", milliseconds, "99 % of pages within {}"),),
    "slow": (("most_in_flight", count, "{} in flight at once"),),
}
"""For the headline: key, how the number is written, the words around it."""
COMMON_ABOUT: Sequence[tuple[str, Any, str]] = (
    ("recorded_per_s", per_second, "{} recorded"),
    ("planned_per_s", per_second, "{} planned"),
)
COMMON_TILES: Sequence[tuple[str, str, Any]] = (
    ("recorded_per_s", "recorded", per_second),
    ("lateness_ms.p99", "late at most, 99 %", milliseconds),
    ("cpu_us_per_run.total", "CPU per run", microseconds),
    ("wal_bytes_per_run", "log per run", size_of),
    ("statements_per_run", "statements per run", plain),
)
MOST_TILES = 5


def write(path: Path, summary: Mapping[str, Any]) -> Path:
    """Write the page; it is complete or not there at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(document(summary), encoding="utf-8")
    return unfinished.replace(path)


def document(summary: Mapping[str, Any]) -> str:
    """The whole page for the content of one summary.json; any keys may be missing."""
    whole, runs = Run("", summary), runs_of(summary)
    title = f"Carillon load: {runs[0].scenario if len(runs) == 1 else 'comparison'}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(STYLE.read_text(encoding="utf-8"))),
    )
    body = tag("body", _header(whole, runs), tag("main", *_sections(runs)), _footer())
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _sections(runs: Sequence[Run]) -> list[Html | None]:
    return [
        report_tables.exactly_once(runs),
        report_curves.lateness(runs),
        report_curves.over_time(runs),
        report_curves.cpu(runs),
        report_tables.own_figures(runs),
        report_tables.rates_and_costs(runs),
        report_tables.repetitions(runs),
        report_tables.measured_on(runs),
    ]


def _header(whole: Run, runs: Sequence[Run]) -> Html:
    return tag(
        "header",
        tag("p", "Carillon · load run", class_="mark-name"),
        _badge(whole),
        tag("h1", _headline(whole, runs)),
        _list("Problems", whole.items("verdict", "problems"), "problems"),
        _list("To know when reading", whole.items("verdict", "notes"), "notes"),
        _bounds(whole),
        *(_tiles(run, named=len(runs) > 1) for run in runs),
        *(_what_was_run(run) for run in runs),
    )


def _badge(whole: Run) -> Html:
    match whole.is_good:
        case True:
            return tag("p", "✓ good", class_="badge good")
        case False:
            return tag("p", "✗ not good", class_="badge bad")
        case _:
            return tag("p", "? no verdict", class_="badge")


def _headline(whole: Run, runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        told = "; ".join(f"{run.name} {_rate(run)}" for run in runs)
        return f"{len(runs)} runs side by side: {told}"
    (run,) = runs
    expected = run.number("expected")
    complete = _is_exactly_once(run)
    if complete and expected is not None:
        return f"{count(expected)} runs, each delivered and recorded exactly once, {_rate(run)}"
    if run.is_good is False and (problems := whole.items("verdict", "problems")):
        return f"{problems[0]}"
    return f"{TITLES.get(run.scenario, run.scenario).capitalize()}: {_rate(run)}"


def _rate(run: Run) -> str:
    """The figure that the scenario is about, in words."""
    for key, told, words in (*ABOUT.get(run.scenario, ()), *COMMON_ABOUT):
        if (value := run.number(*key.split("."))) is not None:
            return words.format(told(value))
    return "no rate measured"


def _is_exactly_once(run: Run) -> bool:
    expected = run.number("expected")
    same = all(run.number(key) == expected for key in ("delivered", "recorded"))
    return bool(expected) and same and run.number("duplicates") == 0 and run.number("missing") == 0


def _list(title: str, items: Sequence[Any], kind: str) -> Html | None:
    if not items:
        return None
    return tag("div", tag("h2", title), tag("ul", *(tag("li", str(item)) for item in items)), class_=kind)


def _bounds(whole: Run) -> Html | None:
    bounds = whole.group("verdict", "bounds")
    if not bounds:
        return None
    told = ", ".join(
        f"{option} {value:g}" if number(value) is not None else str(option)
        for option, value in bounds.items()
    )
    return tag("p", f"Judged by: {told}.", class_="note")


def _tiles(run: Run, *, named: bool) -> Html:
    wanted = [*TILES.get(run.scenario, ()), *COMMON_TILES]
    shown: dict[str, Html] = {}
    for key, label, told in wanted:
        value = run.number(*key.split("."))
        if value is not None and key not in shown and len(shown) < MOST_TILES:
            shown[key] = tag("div", tag("b", told(value)), tag("span", label), class_="tile")
    name = tag("h3", run.name) if named else None
    return join(name, tag("div", *shown.values(), class_="tiles") if shown else None)


def _what_was_run(run: Run) -> Html:
    facts = [TITLES.get(run.scenario, run.scenario)]
    for key, word in (("schedules", "schedules"), ("tenants", "tenants"), ("executors", "executors")):
        if (value := run.number(key)) is not None:
            facts.append(f"{count(value)} {word}")
    if (mode := run.text("claim_mode")) is not None:
        facts.append(f"{mode} mode")
    if repeats := len(run.items("repeats")):
        facts.append(f"median of {repeats}")
    if (measured_at := run.text("env", "measured_at")) is not None:
        facts.append(measured_at.replace("T", " ").replace("+00:00", " UTC"))
    command = " ".join(str(each) for each in run.items("env", "arguments"))
    told = tag("p", *(tag("span", fact) for fact in facts), class_="facts")
    return join(told, tag("p", tag("code", f"carillon {command}"), class_="facts") if command else None)


def _footer() -> Html:
    text = "Written by carillon load beside its summary.json, which has every figure of this page."
    return tag("footer", tag("p", text))
