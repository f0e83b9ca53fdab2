"""The report: it renders whatever it gets, asks for nothing, hides nothing, and believes nothing."""

from __future__ import annotations

import copy
import itertools
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.load import report
from app.load.compare import compared
from app.load.report_charts import nice_axis
from app.load.report_html import Html, tag
from app.load.report_numbers import milliseconds, number, plain, size_of, tick
from app.load.report_run import COMMON as PLACED
from app.load.summary import COMMON

BURST: dict[str, Any] = {
    "scenario": "burst",
    "claim_mode": "postgres",
    "schedules": 2000,
    "tenants": 10,
    "executors": 2,
    "expected": 2000,
    "delivered": 2000,
    "recorded": 2000,
    "duplicates": 0,
    "missing": 0,
    "planned_per_s": 40_000.0,
    "delivered_per_s": 6100.0,
    "recorded_per_s": 6000.0,
    "lateness_ms": {"p50": 120.5, "p90": 250.0, "p99": 310.25, "p999": 330.0, "max": 333.0},
    "cpu_us_per_run": {
        "total": 290.0,
        "executor": 180.0,
        "planner": 30.0,
        "postgres": 60.0,
        "receiver": 20.0,
        "broker": 9.0,
    },
    "wal_bytes_per_run": 1830.0,
    "statements_per_run": 0.02,
    "verdict": {"ok": True, "problems": [], "notes": [], "bounds": {}},
    "env": {
        "versions": {"postgresql": "18.6"},
        "cores": 2,
        "server_settings": {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"},
        "arguments": ["load", "burst"],
    },
    "series": {
        "step_ms": 100,
        "begin_ms": -200,
        "due": [0, 0, 2000, 0, 0],
        "planned": [1500, 500, 0, 0, 0],
        "delivered": [0, 0, 900, 900, 200],
        "recorded": [0, 0, 800, 900, 300],
        "backlog": [0, 0, 1200, 300, 0],
    },
    "lateness_curve": [[0, 2.0], [50, 120.5], [90, 250.0], [99, 310.25], [100, 333.0]],
    "repeats": [],
}


class Page(HTMLParser):
    """The elements of a page, its text, and whether every element is closed in its turn."""

    OPEN_ENDED = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self._stack: list[str] = []
        self.feed(text)
        self.close()
        assert self._stack == []

    def handle_starttag(self, element: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((element, dict(attributes)))
        if element not in self.OPEN_ENDED:
            self._stack.append(element)

    def handle_startendtag(self, element: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((element, dict(attributes)))

    def handle_endtag(self, element: str) -> None:
        assert self._stack.pop() == element

    def handle_data(self, data: str) -> None:
        if self._stack and self._stack[-1] != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.pieces)

    def named(self, element: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == element]


def page(summary: dict[str, Any]) -> Page:
    return Page(report.document(summary))


def changed(**keys: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BURST), **keys}


def test_the_first_thing_said_is_whether_it_went_well() -> None:
    text = page(BURST).text
    assert "✓ good" in text
    assert "2,000 runs, each delivered and recorded exactly once, 6,000/s recorded" in text
    assert "carillon load burst" in text
    assert "Durability: fsync on, full_page_writes on, synchronous_commit on." in text
    assert "✗" not in text


def test_what_was_lost_or_doubled_is_the_headline_and_marked_without_colour() -> None:
    problems = ["3 of 2,000 deliveries are missing"]
    verdict = {"ok": False, "problems": problems, "notes": ["slow hour"], "bounds": {"--max-p99-ms": 300.0}}
    bad = page(changed(missing=3, duplicates=1, delivered=1997, verdict=verdict))
    assert bad.pieces[bad.pieces.index("✗ not good") + 1] == problems[0]
    assert [bad.text.count(each) for each in ("✗ 3\n", "✗ 1\n", "✗ 1,997\n")] == [1, 1, 1]
    assert "slow hour" in bad.text
    assert "--max-p99-ms 300" in bad.text


def test_a_summary_with_nothing_in_it_says_that_nothing_is_known() -> None:
    text = page({}).text
    assert "? no verdict" in text
    assert "no rate measured" in text
    assert text.count("Not measured in this scenario.") == 3
    assert "the server's settings are not known" in text
    assert "exactly once," not in text


@pytest.mark.parametrize(
    "key", ["lateness_ms", "cpu_us_per_run", "series", "lateness_curve", "env", "recorded"]
)
def test_one_missing_group_is_said_to_be_missing_and_the_others_are_there(key: str) -> None:
    without = page({name: value for name, value in BURST.items() if name != key})
    whole = page(BURST)
    said = ("not measured", "Not recorded", "Not measured", "There is no curve", "not known")
    count = sum(without.text.count(each) for each in said)
    assert count > sum(whole.text.count(each) for each in said)
    assert len(without.named("section")) == len(whole.named("section"))


def test_nothing_is_asked_for_from_anywhere() -> None:
    text = report.document(BURST)
    assert not [
        name for name, _ in Page(text).elements if name in ("script", "link", "img", "iframe", "object")
    ]
    assert not {"src", "href", "action", "data"} & {key for _, keys in Page(text).elements for key in keys}
    assert "url(" not in text
    assert "@import" not in text


def test_text_from_a_summary_stays_text() -> None:
    evil = "<script>alert(1)</script>\"'&<b onmouseover=x>"
    verdict = {"ok": False, "problems": [evil], "notes": [evil], "bounds": {evil: 1.0}}
    env = {evil: evil, "server_settings": {evil: evil}, "versions": {"x": evil}, "arguments": [evil]}
    poisoned = changed(verdict=verdict, env=env, scenario=evil, claim_mode=evil, strange={evil: evil})
    for summary in (poisoned, compared({evil: poisoned, "b": poisoned})):
        found = page(summary)
        assert not found.named("script")
        assert not found.named("b") or all(keys == {} for keys in found.named("b"))
        assert evil in found.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@example({"env": {"": math.nan}, "verdict": {"ok": True, "bounds": {"--max": 10**400}}})
@example({"series": {"step_ms": 1e300, "begin_ms": -1e300, "planned": [1, 1e300]}, "runs": {"": None}})
@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from([*BURST, "runs", "quiet", "ratio", "claim_ms"]), JSON))
def test_no_summary_makes_it_fail(keys: dict[str, Any]) -> None:
    page({**BURST, **keys})
    page({"runs": {"one": keys, "two": BURST}})


def test_runs_side_by_side_have_a_column_each_and_their_ratio() -> None:
    other = changed(claim_mode="kafka", recorded_per_s=7200.0, missing=1)
    found = page(compared({"postgres": BURST, "kafka": other}))
    assert "2 runs side by side: postgres 6,000/s recorded; kafka 7,200/s recorded" in found.text
    assert "1.2 ×" in found.text.replace("1.20 ×", "1.2 ×")
    assert found.text.count("postgres") >= 5
    assert "✗ 1\n" in found.text


@pytest.mark.parametrize(
    ("scenario", "own", "said"),
    [
        ("steady", {"idle_schedules": 1_000_000, "idle_cpu_percent": 0.42}, ["1,000,000", "0.420 %"]),
        (
            "fairness",
            {"quiet": {"solo_p99_ms": 9.5, "burst_p99_ms": 12.0, "ratio": 1.26}},
            ["9.50 ms", "1.26 ×", "the quiet tenants' p99 is 12 ms during the burst"],
        ),
        (
            "slow",
            {"claim_ms": {"before": {"p99": 2.1, "count": 7}}, "most_in_flight": 10_000},
            ["p99 2.10 ms", "of 7", "10,000 in flight"],
        ),
        ("horizon", {"ratio": 0.97, "held_recorded_per_s": [5900.0, 5800.0]}, ["0.970 ×", "5,900/s, 5,800/s"]),
        ("history", {"page_p99_ms": 4.2, "run_p99_ms": None, "rows": 10**7}, ["4.20 ms", "not measured", "10,000,000"]),
        ("claims", {"claim_settle_per_s": 31_000.0}, ["31,000/s claimed and settled"]),
        ("planner", {"planned_within_lookahead": True}, ["planned within lookahead", "yes"]),
    ],
)  # fmt: skip
def test_each_scenario_s_own_figures_are_shown_with_their_units(
    scenario: str, own: dict[str, Any], said: list[str]
) -> None:
    text = page({**changed(scenario=scenario, recorded=None), **own}).text
    assert [each for each in said if each not in text] == []


def test_every_common_key_has_a_place_of_its_own() -> None:
    assert set(COMMON) <= PLACED


def test_repetitions_show_their_spread() -> None:
    repeats = [{"recorded_per_s": rate, "lateness_ms": {"p99": 300.0}} for rate in (5000.0, 7000.0, 6000.0)]
    text = page(changed(repeats=repeats)).text
    assert "5,000/s to 7,000/s" in text
    assert "5,000/s, 7,000/s, 6,000/s" in text
    assert "median of 3" in text


def test_the_axis_gives_each_nine_the_same_room() -> None:
    curve = [[level, 1.0] for level in (0, 90, 99, 99.9, 99.99, 100)]
    (drawn,) = [keys for keys in page(changed(lateness_curve=curve, series=None)).named("path")]
    steps = [float(point.split(" ")[0]) for point in str(drawn["d"])[1:].split("L")]
    widths = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert widths == pytest.approx([*[widths[0]] * 4, 0], abs=0.3)  # 100 % is the edge


def test_writing_replaces_the_page_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    report.write(path, {})
    assert report.write(path, BURST) == path
    assert path.read_text(encoding="utf-8") == report.document(BURST)
    assert list(path.parent.iterdir()) == [path]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))
def test_an_axis_covers_what_it_shows_with_few_ticks(low: float, span: float) -> None:
    axis = nice_axis("", low, low + span, str)
    width = axis.high - axis.low
    assert axis.low <= low + 1e-6 * width
    assert axis.high >= low + span - 1e-6 * width
    assert 2 <= len(axis.ticks) <= 13


def test_numbers_are_written_for_people() -> None:
    assert [plain(each) for each in (0.0, 0.056, 4.214, 37.46, 8123.4, 3.0)] == [
        *("0", "0.0560", "4.21", "37.5", "8,123", "3"),
    ]
    assert [milliseconds(each) for each in (0.35, 12.44, 3250.0, 170_800.0)] == [
        *("350 µs", "12.4 ms", "3.25 s", "2 min 51 s"),
    ]
    assert [size_of(each) for each in (480.0, 1830.0, 24e6)] == ["480 B", "1.83 KB", "24 MB"]
    assert [tick(each) for each in (0.0, 250.0, 2500.0, 1_500_000.0)] == ["0", "250", "2.5k", "1.5M"]
    assert [number(each) for each in (True, "1", None, math.nan, math.inf, 1)] == [None] * 5 + [1.0]


def test_only_html_is_not_escaped() -> None:
    assert tag("td", "a < b", Html("<br>"), 1.5, None, class_="n") == '<td class="n">a &lt; b<br>1.5</td>'
    assert tag("line", x1=1.0, aria_label='"') == '<line x1="1" aria-label="&quot;"/>'
