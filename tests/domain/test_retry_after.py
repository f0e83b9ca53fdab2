"""`Retry-After` is read as RFC 9110 writes it and in no other way."""

from __future__ import annotations

import email.utils
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.retry_after import LONGEST, asked_delay, parse_http_date

NOW = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)  # a Sunday
HOUR = timedelta(hours=1)


def asked(value: str, *more: tuple[str, str]) -> timedelta | None:
    return asked_delay((("retry-after", value), *more), NOW)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("1", 1),
        ("120", 120),
        ("00120", 120),
        ("86400", 86_400),
        ("86401", 86_400),
        ("0" * 500 + "7", 7),
    ],
)
def test_plain_digits_are_seconds(value: str, seconds: int) -> None:
    assert asked(value) == timedelta(seconds=seconds)


@pytest.mark.parametrize("value", ["9999999999", "9" * 400, "9" * 5000])
def test_any_number_of_seconds_is_clamped(value: str) -> None:
    assert asked(value) == LONGEST


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "-5",
        "+5",
        "5.5",
        "5,5",
        "1e3",
        " 5",
        "5 ",
        "５",
        "٥",
        "0x10",
        "5s",
        "5\n",
        "1_000",
        "²",
        "soon",
        "None",
    ],
)
def test_anything_else_asks_for_nothing(value: str) -> None:
    assert asked(value) is None


@pytest.mark.parametrize(
    "value",
    ["Sun, 17 May 2026 13:00:00 GMT", "Sunday, 17-May-26 13:00:00 GMT", "Sun May 17 13:00:00 2026"],
)
def test_each_of_the_three_date_forms_is_read(value: str) -> None:
    assert asked(value) == HOUR
    assert parse_http_date(value, NOW) == NOW + HOUR


@pytest.mark.parametrize(
    "value",
    [
        "Sun, 17 May 2026 13:00:00 UTC",
        "Sun, 17 May 2026 13:00:00 +0200",
        "Sun, 17 May 2026 13:00:00",
        "Sun, 17 may 2026 13:00:00 GMT",
        "17 May 2026 13:00:00 GMT",
        "Sun, 7 May 2026 13:00:00 GMT",
        "Sun, 31 Feb 2026 13:00:00 GMT",
        "Sun, 17 May 2026 24:00:00 GMT",
        "Sun, 17 May 0000 13:00:00 GMT",
        "Sun, 17 May 2026 13:00 GMT",
        "Sun, 17 May ２０２６ 13:00:00 GMT",
        "2026-05-17T13:00:00Z",
    ],
)
def test_other_dates_ask_for_nothing(value: str) -> None:
    assert asked(value) is None


def test_a_date_that_has_passed_asks_for_nothing_and_a_far_one_for_the_longest() -> None:
    assert asked("Sun, 17 May 2026 12:00:00 GMT") is None
    assert asked("Sun, 06 Nov 1994 08:49:37 GMT") is None
    assert asked("Sat, 17 May 2046 12:00:00 GMT") == LONGEST


def test_a_date_is_measured_by_the_answers_own_clock() -> None:
    wrong_clock = ("date", "Sun, 17 May 2026 10:00:00 GMT")
    assert asked("Sun, 17 May 2026 10:30:00 GMT", wrong_clock) == timedelta(minutes=30)
    assert asked("Sun, 17 May 2026 10:30:00 GMT") is None
    assert asked("Sun, 17 May 2026 12:30:00 GMT", ("date", "nonsense")) == timedelta(minutes=30)


def test_two_different_fields_ask_for_nothing_and_two_equal_ones_agree() -> None:
    assert asked_delay((("Retry-After", "5"), ("retry-after", "6")), NOW) is None
    assert asked_delay((("Retry-After", "5"), ("retry-after", "5")), NOW) == timedelta(seconds=5)
    assert asked_delay((("content-type", "5"),), NOW) is None


@pytest.mark.parametrize(
    ("digits", "year"), [("26", 2026), ("76", 2076), ("77", 1977), ("99", 1999), ("00", 2000)]
)
def test_two_digit_years_are_never_more_than_fifty_years_ahead(digits: str, year: int) -> None:
    found = parse_http_date(f"Sunday, 17-May-{digits} 13:00:00 GMT", NOW)
    assert found is not None
    assert found.year == year


def test_a_leap_second_is_a_time() -> None:
    assert parse_http_date("Sun, 17 May 2026 12:59:60 GMT", NOW) == NOW + HOUR - timedelta(seconds=1)


@given(st.integers(0, 253_402_300_799).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)))
def test_every_instant_survives_an_independent_writer(at: datetime) -> None:
    assert parse_http_date(email.utils.format_datetime(at, usegmt=True), NOW) == at
    assert (
        parse_http_date(
            at.strftime("%a %b ") + f"{at.day:2d}" + at.strftime(" %H:%M:%S ") + f"{at.year:04d}", NOW
        )
        == at
    )


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_is_an_error_or_a_negative_delay(value: str, date: str) -> None:
    delay = asked_delay((("retry-after", value), ("date", date)), NOW.astimezone(timezone(HOUR)))
    assert delay is None or timedelta() <= delay <= LONGEST
