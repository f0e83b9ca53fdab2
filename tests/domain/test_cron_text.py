"""The dialect: what may be written, what it is rewritten into, and how a refusal reads."""

import hashlib
from uuid import UUID, uuid4

import pytest

from app.domain import cron_text
from app.domain.ids import ScheduleId
from app.errors import InvalidInput

SCHEDULE = ScheduleId(UUID("0192f0c1-2345-7000-8000-000000000001"))


def plain(expression: str) -> str:
    return cron_text.plain(expression, SCHEDULE)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("  0\t9   * * 1 ", "0 9 * * 1"),
        ("00 09 * * *", "0 9 * * *"),
        ("@hourly", "0 * * * *"),
        ("@Daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("0 0 * jan-Mar,DEC mon,Wed", "0 0 * 1-3,12 1,3"),
        ("0 0 l * *", "0 0 L * *"),
        ("0 0 L,15 * *", "0 0 L,15 * *"),
        ("0 0 * * MON#2,7#1", "0 0 * * 1#2,0#1"),
        ("*/15 */2 */3 */4 */5", "*/15 */2 */3 */4 */5"),
        ("5/15 * * * *", "5/15 * * * *"),
        ("0 0 5-5 * *", "0 0 5 * *"),
    ],
)
def test_names_case_spacing_and_macros_are_settled(written: str, meant: str) -> None:
    assert plain(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("50-10 * * * *", "50-59,0-10 * * * *"),
        ("59-0 * * * *", "59,0 * * * *"),
        ("0 22-2 * * *", "0 22-23,0-2 * * *"),
        ("0 0 30-2 * *", "0 0 30-31,1-2 * *"),
        ("0 0 * NOV-FEB *", "0 0 * 11-12,1-2 *"),
        ("0 0 * * 5-7", "0 0 * * 5-7"),
        ("0 0 * * FRI-SUN", "0 0 * * 5-7"),
        ("0 0 * * 6-0", "0 0 * * 6-7"),
        ("0 0 * * 7-1", "0 0 * * 0-1"),
        ("0 0 * * SUN-TUE", "0 0 * * 0-2"),
        ("0 0 * * FRI-MON", "0 0 * * 5-6,0-1"),
        ("0 0 * * MON-SUN", "0 0 * * 1-7"),
        ("0 0 * * 7-7", "0 0 * * 0"),
        ("0 0 * * 0-7", "0 0 * * 0-7"),
    ],
)
def test_a_range_that_wraps_is_cut_where_the_field_ends(written: str, meant: str) -> None:
    assert plain(written) == meant


REFUSED = {
    "77 * * * *": "minute: 77 is outside 0 to 59",
    "60 * * * *": "minute: 60",
    "* 24 * * *": "hour: 24 is outside 0 to 23",
    "* * 0 * *": "day-of-month: 0 is outside 1 to 31",
    "* * 32 * *": "day-of-month: 32",
    "* * * 0 *": "month: 0 is outside 1 to 12",
    "* * * 13 *": "month: 13",
    "* * * * 8": "day-of-week: 8 is outside 0 to 7",
    "1-60 * * * *": "minute: 60",
    "-5 * * * *": "minute: '-5' is not understood",
    "* -1 * * *": "hour: '-1' is not understood",
    "1--3 * * * *": "minute",
    "+5 * * * *": "'\\+' has no meaning",
    "1.5 * * * *": "'.' has no meaning",
    "1e1 * * * *": "minute: '1E1' is not a number",
    "0x1 * * * *": "minute: '0X1' is not a number",
    "1_0 * * * *": "'_' has no meaning",
    "*/0 * * * *": "minute: a step must be at least 1",
    "5-5/0 * * * *": "minute: a step must be at least 1",
    "59-0/0 * * * *": "minute: a step must be at least 1",
    "* * 31-1/0 * *": "day-of-month: a step must be at least 1",
    "H/0 * * * *": "minute: a step must be at least 1",
    "H(1-5)/0 * * * *": "minute: a step must be at least 1",
    "5/0 * * * *": "minute: a step must be at least 1",
    "*/-1 * * * *": "minute",
    "*/ * * * *": "minute",
    "*/2/3 * * * *": "minute",
    "*/* * * * *": "minute",
    "/5 * * * *": "minute",
    "5-3/2 * * * *": "minute: '5-3/2': a step needs a range that goes up",
    "5-5/2 * * * *": "minute: '5-5/2': a step needs a range that goes up",
    "0 0 * 11-2/3 *": "month: '11-2/3': a step needs",
    "0 0 * 11-3/3 *": "month: '11-3/3': a step needs",
    "0 0 * DEC-FEB/2 *": "month: 'DEC-FEB/2': a step needs",
    "0 0 * * FRI-TUE/2": "day-of-week: 'FRI-TUE/2': a step needs",
    "0 0 * * FRI-SUN/2": "day-of-week: 'FRI-SUN/2': a step needs",
    ", * * * *": "minute: ''",
    "1, * * * *": "minute: ''",
    "1,,2 * * * *": "minute: ''",
    "1- * * * *": "minute",
    "1-2-3 * * * *": "minute",
    "*-5 * * * *": "minute",
    "** * * * *": "minute",
    "*5 * * * *": "minute",
    "R * * * *": "minute: 'R' \\(random\\) is not supported",
    "R(0-5) * * * *": "minute: 'R'",
    "R/15 * * * *": "minute: 'R'",
    "0 0 15W * *": "day-of-month: 'W'",
    "0 0 W15 * *": "day-of-month: 'W'",
    "0 0 LW * *": "day-of-month: 'W'",
    "0 0 1W,15W * *": "day-of-month: 'W'",
    "0 0 ? * 1": "day-of-month: '\\?' is not supported: write \\*",
    "0 0 1 * ?": "day-of-week: '\\?'",
    "0 0 ? * ?": "day-of-month: '\\?'",
    "0 0 L-3 * *": "day-of-month: counting days back",
    "0 0 L/2 * *": "day-of-month",
    "0 0 1-L * *": "day-of-month",
    "L 0 * * *": "minute",
    "0 0 * * L": "day-of-week",
    "0 0 * * 5L": "day-of-week: the last given weekday",
    "0 0 * * L5": "day-of-week: the last given weekday",
    "0 0 * * FRIL": "day-of-week: the last given weekday",
    "0 0 * * 1#0": "day-of-week: in '1#0' the number after # must be 1 to 5",
    "0 0 * * 1#6": "day-of-week: in '1#6'",
    "0 0 * * 8#1": "day-of-week: 8",
    "0 0 * * 1-5#2": "day-of-week",
    "0 0 * * *#2": "day-of-week",
    "0 0 * * 1#2#3": "day-of-week",
    "0 0 * * 1,3#2": "day-of-week: n-th weekdays \\(a#n\\) and plain weekdays cannot share a list",
    "0 0 8-9 * 0#2": "day-of-week: an n-th weekday \\(a#n\\) needs \\* as day-of-month",
    "0 0 */2 * 0#2": "day-of-week: an n-th weekday",
    "0 0 1-31 * 0#2": "day-of-week: an n-th weekday",
    "0 0 1#2 * *": "day-of-month",
    "0 0 * MON *": "month: 'MON' is not a number or one of JAN",
    "0 0 JAN * *": "day-of-month: 'JAN' is not a number",
    "0 0 * * JAN": "day-of-week: 'JAN' is not a number or one of SUN",
    "0 0 * * MONDAY": "day-of-week: 'MONDAY'",
    "H(5-1) * * * *": "minute: 'H\\(5-1\\)': the range of H must go up",
    "H(0-60) * * * *": "minute: 60",
    "H/90 * * * *": "minute: 'H/90': the step must be at most 60",
    "H() * * * *": "minute",
    "H-5 * * * *": "minute",
    "1-H * * * *": "minute",
    "0 0 * * H#2": "day-of-week",
    "": "has 0 fields; it must have 5",
    "   ": "has 0 fields",
    "*": "has 1 fields",
    "* * * *": "has 4 fields",
    "* * * * * *": "has 6 fields; it must have 5: .* \\(seconds and years are not supported",
    "0 0 0 29 2 *": "has 6 fields",
    "0 0 0 29 2 * 2028": "has 7 fields",
    "@reboot": "@reboot is not one of @yearly",
    "@every 5s": "@every 5s is not one of .*; for an interval use the kind 'every' with every_seconds",
    "@EVERY 5m": "for an interval use the kind 'every'",
    "@": "@ is not one of",
    "@daily @daily": "is not one of",
    "CRON_TZ=UTC * * * * *": "'_' has no meaning in a cron expression \\(a zone goes into recurrence.timezone\\)",
    "0~30 * * * *": "'~' has no meaning",
    "* * * * *\n": "'\\\\n' has no meaning",
    "*\n* * * *": "'\\\\n' has no meaning",
    "* * * * *\0": "'\\\\x00' has no meaning",
    "\0": "'\\\\x00' has no meaning",
    "0\u00a00 * * *": "has no meaning",
    "0\u30000 * * *": "has no meaning",
    "٥ * * * *": "'٥' has no meaning",
    "５ * * * *": "'５' has no meaning",
    "² * * * *": "'²' has no meaning",
    "0 0 * * ſun": "'ſ' has no meaning",
    "−5 * * * *": "'−' has no meaning",
    "\ud800 * * * *": "has no meaning",
    "; DROP TABLE schedule": "';' has no meaning",
    "0," * 100_000 + "0 * * * *": "is 200009 characters long; at most 256 are allowed",
    "9" * 250 + " * * * *": "is 258 characters long",
    "9" * 240 + " * * * *": "is outside 0 to 59",
}


@pytest.mark.parametrize("expression", REFUSED, ids=lambda text: ascii(text[:30]))
def test_everything_else_is_refused_and_the_refusal_says_where_and_why(expression: str) -> None:
    with pytest.raises(InvalidInput, match=REFUSED[expression]) as refusal:
        plain(expression)
    assert refusal.value.field == "recurrence.cron"
    assert len(str(refusal.value)) < 600


def test_something_that_is_not_text_is_refused() -> None:
    for value in (None, 5, b"* * * * *", ["* * * * *"]):
        with pytest.raises(InvalidInput, match="is not text"):
            cron_text.plain(value, SCHEDULE)  # type: ignore[arg-type]


def test_the_longest_allowed_expression_is_accepted() -> None:
    minutes = ",".join(str(minute % 10) for minute in range(124))
    assert len(f"{minutes} * * * *") == 255
    assert plain(f"{minutes} * * * * ").startswith("0,1,2")


def test_h_is_the_hash_of_the_schedule_and_the_field() -> None:
    def draw(place: str) -> int:
        return int.from_bytes(hashlib.sha256(SCHEDULE.bytes + place.encode()).digest()[:8], "big")

    assert plain("H H H H H") == (
        f"{draw('minute') % 60} {draw('hour') % 24} {1 + draw('day-of-month') % 28}"
        f" {1 + draw('month') % 12} {draw('day-of-week') % 7}"
    )
    # Written out once, so that no later release moves the fires of existing schedules.
    assert plain("H H * * *") == "21 0 * * *"


def test_h_stays_the_same_for_a_schedule_and_spreads_over_schedules() -> None:
    assert plain("h H(0-7) * * *") == plain("H h(0-7) * * *")
    minutes = {cron_text.plain("H * * * *", ScheduleId(uuid4())).split()[0] for _ in range(2_000)}
    assert minutes == {str(minute) for minute in range(60)}


def test_a_hashed_day_exists_in_every_month_unless_a_range_asks_for_more() -> None:
    days = {int(cron_text.plain("0 0 H * *", ScheduleId(uuid4())).split()[2]) for _ in range(2_000)}
    assert days == set(range(1, 29))
    late = {int(cron_text.plain("0 0 H(29-31) * *", ScheduleId(uuid4())).split()[2]) for _ in range(200)}
    assert late == {29, 30, 31}


def test_a_hashed_step_keeps_its_rhythm_within_its_range() -> None:
    for _ in range(300):
        text = cron_text.plain("H/15 H(9-17)/4 * * *", ScheduleId(uuid4()))
        minute, hour, *_ = text.split()
        assert int(minute.partition("-")[0]) < 15
        assert minute.endswith("-59/15")
        assert 9 <= int(hour.partition("-")[0]) <= 12
        assert hour.endswith("-17/4")


def test_a_hashed_step_that_leaves_one_value_is_that_value() -> None:
    seen = {cron_text.plain("H(0-5)/6 * * * *", ScheduleId(uuid4())).split()[0] for _ in range(300)}
    assert seen == {"0", "1", "2", "3", "4", "5"}


def test_h_in_a_list_shifts_all_its_ranges_alike() -> None:
    first, second = plain("H(0-29),H(30-59) * * * *").split()[0].split(",")
    assert int(second) - int(first) == 30


def test_names_with_an_h_in_them_do_not_depend_on_the_schedule() -> None:
    for expression in ("0 0 * MAR THU", "0 0 * * thu", "@monthly"):
        assert not cron_text.uses_hash(expression)
    for expression in ("H * * * *", "0 h * * *", "0 0 1,H * *", "0 0 * * H(1-5)"):
        assert cron_text.uses_hash(expression)
