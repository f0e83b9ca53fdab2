"""Cron: what is refused only when both libraries have read it, ends of the calendar, bounded work, notes."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import FrameType
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain import cron, cron_text
from app.domain.ids import EPOCH, ScheduleId
from app.errors import InvalidInput

SCHEDULE = ScheduleId(UUID(int=1))
START = datetime(2026, 1, 1, tzinfo=UTC)


def next_fire(text: str, after: datetime = START, zone: str = "UTC") -> datetime | None:
    return cron.next_fire(text, zone, after, schedule_id=SCHEDULE)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    "text",
    ["0 0 31 4 *", "0 0 30 2 *", "0 0 30-31 2 *", "0 0 31 2,4,6,9,11 *", "0 0 31 6 */2", "0 0 31 4 *,1"],
)
def test_days_that_none_of_the_months_has_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="day-of-month: never fires") as refusal:
        next_fire(text)
    assert refusal.value.field == "recurrence.cron"
    with pytest.raises(InvalidInput, match="never fires"):
        cron.check(text, "UTC")


def test_a_hashed_day_that_its_month_lacks_is_refused_for_the_schedules_it_falls_on() -> None:
    cron.check("0 0 H(30-31) 4 *", "UTC")
    answers = set()
    for _ in range(50):
        schedule = ScheduleId(uuid4())
        day = cron_text.plain("0 0 H(30-31) 4 *", schedule).split()[2]
        try:
            cron.next_fire("0 0 H(30-31) 4 *", "UTC", START, schedule_id=schedule)
            answers.add((day, "fires"))
        except InvalidInput:
            answers.add((day, "refused"))
    assert answers == {("30", "fires"), ("31", "refused")}


@pytest.mark.parametrize(
    ("text", "place"),
    [("0 0 * * 1/2", "day-of-week"), ("0 0 * * MON/3", "day-of-week"), ("0 0 * * 7/2", "day-of-week")],
)
def test_what_two_cron_libraries_read_differently_is_refused(text: str, place: str) -> None:
    with pytest.raises(InvalidInput, match=f"{place}: cron programs disagree"):
        next_fire(text)


@pytest.mark.parametrize(
    "text",
    [
        "59/15 * * * *",
        "0 0 1/10 * *",
        "0 0 * JAN/2 *",
        "0 0 * * 2/2",
        "0 0 * * */7",
        "0 0 * * 5-7/2",
        "0 0 * * 0-7/3",
        "*,5 * * * *",
        "5,*/20 * * * *",
        "*/90 * * * *",
        "1-5/10 * * * *",
        "0 0 L,15 2 *",
        "0 0 L * 5",
        "0 0 * * 1#1,1#3,3#5",
        "0 0 30 2 1",
    ],
)
def test_what_both_libraries_read_alike_is_accepted(text: str) -> None:
    cron.check(text, "UTC")
    found = next_fire(text)
    assert found is not None
    assert found > START


@pytest.mark.parametrize("failure", [ValueError, KeyError, RecursionError, AssertionError, Exception])
def test_whatever_a_library_throws_is_a_refusal(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure("out of the blue")

    monkeypatch.setattr("app.domain.cron.croniter.expand", fail)
    unread = f"{len(failure.__name__)},59 13 17 11 *"  # not remembered from another test
    with pytest.raises(InvalidInput) as refusal:
        next_fire(unread)
    assert "out of the blue" not in str(refusal.value)


def test_an_unknown_zone_is_refused_by_its_own_name() -> None:
    with pytest.raises(InvalidInput) as refusal:
        next_fire("* * * * *", zone="Mars/Olympus")
    assert refusal.value.field == "recurrence.timezone"
    with pytest.raises(InvalidInput) as refusal:
        cron.check("* * * * *", "../UTC")
    assert refusal.value.field == "recurrence.timezone"


@pytest.mark.parametrize(
    "zone", ["UTC", "America/New_York", "Asia/Tokyo", "Pacific/Kiritimati", "Etc/GMT+12"]
)
@pytest.mark.parametrize("text", ["* * * * *", "0 0 1 1 *", "59 23 31 12 *", "0 0 29 2 *", "30 2 * * SUN#1"])
def test_where_the_calendar_ends_there_is_no_next_fire_and_no_error(text: str, zone: str) -> None:
    now: datetime | None = at("9999-12-30T00:00:00+00:00")
    for _ in range(3_000):
        assert now is not None
        following = next_fire(text, now, zone)
        if following is None:
            break
        assert following > now
        now = following
    else:
        pytest.fail("the calendar does not end")
    for moment in (
        datetime.max.replace(tzinfo=UTC),
        at("9999-12-31T23:59:59-11:00"),
        at("9999-12-31T23:59:59+14:00"),
    ):
        last = next_fire(text, moment, zone)
        assert last is None or last > moment


@pytest.mark.parametrize("year", [2098, 2099, 2100, 2150, 2399, 9000, 9998])
def test_there_is_no_hidden_last_year(year: int) -> None:
    assert next_fire("0 0 1 1 *", datetime(year, 6, 1, tzinfo=UTC)) == datetime(year + 1, 1, 1, tzinfo=UTC)


def test_a_leap_day_on_a_sunday_is_found_across_a_century_without_one() -> None:
    # 2100 is no leap year: from 2088 on, the 29th of February is a Sunday again only in 2128.
    assert next_fire("0 0 29 2 */7", at("2088-02-29T00:00:00+00:00")) == at("2128-02-29T00:00:00+00:00")


def test_occurrences_start_in_1970_whatever_is_asked() -> None:
    for asked in (
        EPOCH,
        datetime.min.replace(tzinfo=UTC),
        at("0001-01-01T00:00:00+05:00"),
        at("1969-07-20T20:17:00Z"),
    ):
        expected = EPOCH if asked < EPOCH else EPOCH + timedelta(minutes=1)
        assert next_fire("* * * * *", asked) == expected


def test_a_naive_instant_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="needs a zone"):
        next_fire("* * * * *", datetime(2026, 1, 1))  # noqa: DTZ001


def test_both_showings_of_a_repeated_time_are_told_apart() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0)
    second = first.replace(fold=1)
    assert first == second  # to Python they are the same key
    assert next_fire("*/15 * * * *", first, "Europe/Berlin") == at("2026-10-25T00:45:00Z")
    assert next_fire("*/15 * * * *", second, "Europe/Berlin") == at("2026-10-25T01:45:00Z")


def test_the_fire_inside_a_gap_is_found_from_before_and_left_behind_from_its_own_instant() -> None:
    jump, week_later = at("2021-03-28T01:00:00Z"), at("2021-04-04T00:00:00Z")
    for asked in ("2021-03-28T00:59:00Z", "2021-03-28T00:59:59.999999Z"):
        assert next_fire("0 2 * * 0", at(asked), "Europe/Berlin") == jump
    for asked in ("2021-03-28T01:00:00Z", "2021-03-28T01:00:00.000001Z", "2021-03-28T01:30:00Z"):
        assert next_fire("0 2 * * 0", at(asked), "Europe/Berlin") == week_later


def work(action: Callable[[], object]) -> int:
    """How many calls `action` makes: the cost of a computation without a clock."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


HOSTILE = [
    "0 0 29 2 */7",
    "0 0 * 2 MON#5",
    "0 0 * 2 1#5,2#5",
    "0 0 29 2 */6",
    "59 23 29 2 *",
    ",".join(["0"] * 124) + " * * * *",
    ",".join(["*/1"] * 60) + " * * * *",
    "0 0 * * " + ",".join(["1#5"] * 60),
    "0 0 31 1-12 */7",
    "0-59 0-23 1-31 1-12 0-7",
    "*/" + "9" * 240 + " * * * *",
    "H(0-59)/1,H(0-59)/1 H H H H",
    "0 " * 120,
    "(" * 256,
    "*" * 256,
    "1-" * 128,
    "H(" * 64 + " * * * *",
    "@" * 200,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_an_expression_costs_a_bounded_amount_of_work_whether_accepted_or_not(text: str) -> None:
    def ask() -> None:
        for after in (
            START,
            at("2072-02-29T00:00:00Z"),
            at("2088-02-29T23:59:59Z"),
            at("9960-03-01T00:00:00Z"),
        ):
            try:
                next_fire(text, after + timedelta(microseconds=1), "America/New_York")
            except InvalidInput:
                return

    assert work(ask) < 200_000


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        st.text(max_size=40),
        st.text(alphabet="0123456789*,-/#LWHR?() SUNMO@", max_size=40),
        st.lists(st.text(alphabet="0123456*,-/#LH()", min_size=1, max_size=8), min_size=5, max_size=5).map(
            " ".join
        ),
    ),
    st.one_of(st.just("UTC"), st.text(max_size=20)),
)
def test_any_text_is_answered_or_refused_by_field_and_nothing_else_comes_out(text: str, zone: str) -> None:
    try:
        found = next_fire(text, START, zone)
    except InvalidInput as refusal:
        found, refused = None, refusal.field
    else:
        refused = "nothing"
    assert (found is None) == (refused in ("recurrence.cron", "recurrence.timezone"))
    assert found is None or found > START


def note(text: str, zone: str, after: str) -> str | None:
    step = cron.next_step(text, zone, at(after), schedule_id=SCHEDULE)
    assert step is not None
    return cron.note(step, text, zone, schedule_id=SCHEDULE)


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00Z", None),
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-03-28T12:00:00Z",
            "fires 03:00 instead of 02:30: the clock jumps from 02:00 to 03:00",
        ),
        (
            "15 2 * * *",
            "Australia/Lord_Howe",
            "2026-10-03T12:00:00Z",
            "fires 02:30 instead of 02:15: the clock jumps from 02:00 to 02:30",
        ),
        (
            "0 12 * * *",
            "Pacific/Apia",
            "2011-12-30T00:00:00Z",
            "fires 00:00 instead of 2011-12-30 12:00: the clock jumps from 2011-12-30 00:00 to 2011-12-31 00:00",
        ),
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-10-24T12:00:00Z",
            "this local time happens twice; fires once, the first time",
        ),
        (
            "30 * * * *",
            "Europe/Berlin",
            "2026-10-25T00:00:00Z",
            "this local time happens twice; fires both times",
        ),
        (
            "30 * * * *",
            "Europe/Berlin",
            "2026-10-25T01:00:00Z",
            "this local time happens twice; fires both times",
        ),
        ("30 3 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", None),
        (
            "0 */2 * * *",
            "Europe/Berlin",
            "2026-03-28T23:00:00Z",
            "nothing fires at 02:00: the clock jumps from 02:00 to 03:00",
        ),
        (
            "*/30 2 * * *",
            "Europe/Berlin",
            "2026-03-28T12:00:00Z",
            "nothing fires at 2026-03-29 02:00: the clock jumps from 02:00 to 03:00",
        ),
        ("30 2 * * *", "UTC", "2026-03-28T12:00:00Z", None),
    ],
)
def test_a_note_says_what_the_change_of_the_clock_does(
    text: str, zone: str, after: str, expected: str | None
) -> None:
    assert note(text, zone, after) == expected


def test_croniter_agrees_on_the_calendar_where_it_reads_days_as_debian_does() -> None:
    texts = ["0 9 * * 1-5", "*/7 3 1,15 * *", "30 4 L * *", "0 0 13 * 5", "0 0 29 2 *", "15 10 * 1,6 3#2"]
    for text in texts:
        theirs = croniter(text, START, ret_type=datetime, implement_cron_bug=True)
        now = START
        for _ in range(20):
            following = next_fire(text, now)
            assert following == theirs.get_next(datetime)
            now = following
