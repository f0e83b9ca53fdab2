"""Recurrences: exact intervals, one-offs, their JSON form, and what is refused by which name."""

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.ids import ScheduleId, is_occurrence_instant
from app.domain.recurrence import (
    Cron,
    Every,
    Once,
    Recurrence,
    from_json,
    next_fire,
    parse,
    preview,
    to_json,
    validate,
)
from app.errors import InvalidInput

SCHEDULE = ScheduleId(UUID(int=1))
NOW = datetime(2026, 3, 28, 12, 0, 0, 123_456, tzinfo=UTC)
MILLISECONDS = st.integers(0, 4_000_000_000_000).map(
    lambda count: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=count)
)
INTERVALS = st.integers(1_000, 366 * 86_400_000).map(lambda count: timedelta(milliseconds=count))


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def following(recurrence: Recurrence, after: datetime) -> datetime | None:
    return next_fire(recurrence, after, schedule_id=SCHEDULE)


@given(INTERVALS, MILLISECONDS, st.integers(0, 10**12))
def test_an_interval_fires_at_whole_multiples_from_its_anchor_and_never_drifts(
    interval: timedelta, anchor: datetime, microseconds: int
) -> None:
    after = anchor + timedelta(microseconds=microseconds)
    fire = following(Every(interval, anchor), after)
    assert fire is not None
    assert after < fire <= after + interval
    assert (fire - anchor) % interval == timedelta()
    assert fire.tzinfo is UTC
    assert is_occurrence_instant(fire)


@given(INTERVALS, MILLISECONDS, st.integers(1, 10**15))
def test_an_interval_does_not_fire_before_its_anchor(
    interval: timedelta, anchor: datetime, microseconds: int
) -> None:
    after = anchor - timedelta(microseconds=microseconds)
    assert following(Every(interval, anchor), after) == anchor


def test_an_interval_asked_from_a_fire_gives_the_one_after() -> None:
    every = Every(timedelta(seconds=5), at("2026-01-01T00:00:00.250Z"))
    assert following(every, every.anchor - timedelta(microseconds=1)) == every.anchor
    assert following(every, every.anchor) == at("2026-01-01T00:00:05.250Z")
    assert following(every, at("2026-01-01T00:00:05.250001Z")) == at("2026-01-01T00:00:10.250Z")


def test_an_interval_is_elapsed_time_and_does_not_notice_the_clocks() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    every = Every(timedelta(hours=24), datetime(2026, 10, 24, 2, 30, tzinfo=berlin))
    before = datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=0)
    # In its own zone Python would subtract wall clocks and lose the hour between the two showings of 02:30.
    assert following(every, before) == at("2026-10-26T00:30:00Z")
    assert following(every, before.replace(fold=1)) == at("2026-10-26T00:30:00Z")
    hourly = Every(timedelta(hours=1), datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=0))
    assert following(hourly, before) == at("2026-10-25T01:30:00Z")
    assert following(hourly, before.replace(fold=1)) == at("2026-10-25T02:30:00Z")


def test_an_interval_ends_with_the_calendar() -> None:
    every = Every(timedelta(days=366), at("2026-01-01T00:00:00Z"))
    assert following(every, datetime.max.replace(tzinfo=UTC)) is None
    with pytest.raises(InvalidInput, match="every_seconds: never fires"):
        validate(every, now=datetime.max.replace(tzinfo=UTC), schedule_id=SCHEDULE)


def test_a_one_off_fires_once() -> None:
    once = Once(at("2026-06-01T02:00:00.500+02:00"))
    instant = at("2026-06-01T00:00:00.500Z")
    assert following(once, instant - timedelta(microseconds=1)) == instant
    assert following(once, instant) is None
    assert following(once, instant + timedelta(days=1)) is None


def test_a_naive_instant_is_a_fault_of_the_caller() -> None:
    naive = datetime(2026, 1, 1)  # noqa: DTZ001
    for recurrence in (Cron("* * * * *", "UTC"), Every(timedelta(seconds=1), NOW_CUT), Once(NOW_CUT)):
        with pytest.raises(ValueError, match="needs a zone"):
            following(recurrence, naive)


NOW_CUT = NOW.replace(microsecond=123_000)


@pytest.mark.parametrize(
    ("interval", "anchor", "field"),
    [
        (timedelta(), NOW_CUT, "recurrence.every_seconds"),
        (timedelta(seconds=-5), NOW_CUT, "recurrence.every_seconds"),
        (timedelta(milliseconds=999), NOW_CUT, "recurrence.every_seconds"),
        (timedelta(days=366, milliseconds=1), NOW_CUT, "recurrence.every_seconds"),
        (timedelta(seconds=1, microseconds=1), NOW_CUT, "recurrence.every_seconds"),
        (timedelta(seconds=1), NOW, "recurrence.anchor"),
        (timedelta(seconds=1), datetime(2026, 1, 1), "recurrence.anchor"),  # noqa: DTZ001
        (timedelta(seconds=1), datetime(1969, 12, 31, tzinfo=UTC), "recurrence.anchor"),
    ],
)
def test_an_impossible_interval_cannot_be_made(interval: timedelta, anchor: datetime, field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Every(interval, anchor)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "instant",
    [NOW, datetime(2026, 1, 1), datetime(1969, 12, 31, 23, 59, tzinfo=UTC)],  # noqa: DTZ001
)
def test_an_impossible_one_off_cannot_be_made(instant: datetime) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Once(instant)
    assert refusal.value.field == "recurrence.at"


ZONES_OF_CALLERS = st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30)), ZoneInfo("Asia/Tokyo")])
RECURRENCES = st.one_of(
    st.builds(
        Cron, st.sampled_from(["*/5 * * * *", "@daily", "H H(0-7) * * MON-FRI"]), st.just("Europe/Berlin")
    ),
    st.builds(
        Every,
        INTERVALS,
        st.builds(lambda moment, zone: moment.astimezone(zone), MILLISECONDS, ZONES_OF_CALLERS),
    ),
    st.builds(Once, st.builds(lambda moment, zone: moment.astimezone(zone), MILLISECONDS, ZONES_OF_CALLERS)),
)


@given(RECURRENCES)
def test_what_is_written_as_json_is_read_back_the_same(recurrence: Recurrence) -> None:
    written = to_json(recurrence)
    assert from_json(json.dumps(written)) == recurrence
    assert parse(written, now=NOW) == recurrence


def test_the_json_form_is_the_agreed_one() -> None:
    assert to_json(Cron("*/5 * * * *", "Europe/Berlin")) == {
        "kind": "cron",
        "cron": "*/5 * * * *",
        "timezone": "Europe/Berlin",
    }
    assert to_json(Every(timedelta(seconds=5), at("2026-01-01T01:00:00+01:00"))) == {
        "kind": "every",
        "every_seconds": 5,
        "anchor": "2026-01-01T00:00:00Z",
    }
    assert to_json(Every(timedelta(milliseconds=1_500), at("2026-01-01T00:00:00.250Z"))) == {
        "kind": "every",
        "every_seconds": 1.5,
        "anchor": "2026-01-01T00:00:00.250000Z",
    }
    assert to_json(Once(at("2026-01-01T00:00:00Z"))) == {"kind": "once", "at": "2026-01-01T00:00:00Z"}


def test_a_stored_form_is_read_in_any_order_and_with_keys_of_a_later_release() -> None:
    stored = '{ "at":"2026-01-01T00:00:00Z",\n "jitter_seconds": 3, "kind": "once"}'
    assert from_json(stored) == Once(at("2026-01-01T00:00:00Z"))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "recurrence"),
        ("null", "recurrence"),
        ("[]", "recurrence"),
        ('"cron"', "recurrence"),
        ("{", "recurrence"),
        ("[" * 100_000, "recurrence"),
        ("{}", "recurrence.kind"),
        ('{"kind": "lunar"}', "recurrence.kind"),
        ('{"kind": ["cron"]}', "recurrence.kind"),
        ('{"kind": "cron", "cron": "* * * * *"}', "recurrence.timezone"),
        ('{"kind": "cron", "cron": null, "timezone": "UTC"}', "recurrence.cron"),
        ('{"kind": "every", "every_seconds": 5}', "recurrence.anchor"),
        (
            '{"kind": "every", "every_seconds": NaN, "anchor": "2026-01-01T00:00:00Z"}',
            "recurrence.every_seconds",
        ),
        ('{"kind": "once"}', "recurrence.at"),
    ],
)
def test_a_damaged_stored_form_is_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        from_json(text)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"kind": "cron", "cron": "@daily"}, Cron("@daily", "UTC")),
        ({"kind": "cron", "cron": "@daily", "timezone": None}, Cron("@daily", "UTC")),
        ({"kind": "every", "every_seconds": 5}, Every(timedelta(seconds=5), NOW_CUT)),
        ({"kind": "every", "every_seconds": 1.001}, Every(timedelta(milliseconds=1_001), NOW_CUT)),
        ({"kind": "every", "every_seconds": Decimal("2.5")}, Every(timedelta(milliseconds=2_500), NOW_CUT)),
        ({"kind": "every", "every_seconds": 60.0, "anchor": None}, Every(timedelta(minutes=1), NOW_CUT)),
        ({"kind": "every", "every_seconds": 31_622_400}, Every(timedelta(days=366), NOW_CUT)),
        (
            {"kind": "every", "every_seconds": 7, "anchor": "2026-01-01T05:30:00.5+05:30"},
            Every(timedelta(seconds=7), datetime(2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC)),
        ),
        ({"kind": "once", "at": "2026-01-01T00:00:00Z"}, Once(datetime(2026, 1, 1, tzinfo=UTC))),
        ({"kind": "once", "at": "2026-01-01t00:00:00.123000000z"}, Once(at("2026-01-01T00:00:00.123Z"))),
        ({"kind": "once", "at": at("2026-01-01T00:00:00+02:00")}, Once(at("2025-12-31T22:00:00Z"))),
    ],
)
def test_what_a_person_writes_is_read(data: dict[str, Any], expected: Recurrence) -> None:
    assert parse(data, now=NOW) == expected


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "kind"),
        ({"kind": None}, "kind"),
        ({"kind": "CRON", "cron": "@daily"}, "kind"),
        ({"kind": 5}, "kind"),
        ({"kind": "cron"}, "cron"),
        ({"kind": "cron", "cron": 5}, "cron"),
        ({"kind": "cron", "cron": ""}, "cron"),
        ({"kind": "cron", "cron": "77 * * * *"}, "cron"),
        ({"kind": "cron", "cron": "0 0 31 4 *"}, "cron"),
        ({"kind": "cron", "cron": "H(1-77) * * * *"}, "cron"),
        ({"kind": "cron", "cron": "@daily", "timezone": "Berlin"}, "timezone"),
        ({"kind": "cron", "cron": "@daily", "timezone": 1}, "timezone"),
        ({"kind": "cron", "cron": "@daily", "every_seconds": 5}, "every_seconds"),
        ({"kind": "cron", "cron": "@daily", "tz": "UTC"}, "tz"),
        ({"kind": "every"}, "every_seconds"),
        ({"kind": "every", "every_seconds": "5"}, "every_seconds"),
        ({"kind": "every", "every_seconds": True}, "every_seconds"),
        ({"kind": "every", "every_seconds": [5]}, "every_seconds"),
        ({"kind": "every", "every_seconds": 0}, "every_seconds"),
        ({"kind": "every", "every_seconds": -5}, "every_seconds"),
        ({"kind": "every", "every_seconds": 0.999}, "every_seconds"),
        ({"kind": "every", "every_seconds": 1.0001}, "every_seconds"),
        ({"kind": "every", "every_seconds": 31_622_400.001}, "every_seconds"),
        ({"kind": "every", "every_seconds": 10**400}, "every_seconds"),
        ({"kind": "every", "every_seconds": 1e308}, "every_seconds"),
        ({"kind": "every", "every_seconds": float("inf")}, "every_seconds"),
        ({"kind": "every", "every_seconds": float("nan")}, "every_seconds"),
        ({"kind": "every", "every_seconds": Decimal("sNaN")}, "every_seconds"),
        ({"kind": "every", "every_seconds": 5, "timezone": "UTC"}, "timezone"),
        ({"kind": "every", "every_seconds": 5, "anchor": "2026-01-01T00:00:00"}, "anchor"),
        ({"kind": "every", "every_seconds": 5, "anchor": "2026-01-01T00:00:00.0001Z"}, "anchor"),
        ({"kind": "every", "every_seconds": 5, "anchor": 0}, "anchor"),
        ({"kind": "once"}, "at"),
        ({"kind": "once", "at": ""}, "at"),
        ({"kind": "once", "at": 1_767_225_600}, "at"),
        ({"kind": "once", "at": "2026-01-01"}, "at"),
        ({"kind": "once", "at": "tomorrow"}, "at"),
        ({"kind": "once", "at": "20260101T000000Z"}, "at"),
        ({"kind": "once", "at": "2026-W01-1T00:00:00Z"}, "at"),
        ({"kind": "once", "at": "2026-02-30T00:00:00Z"}, "at"),
        ({"kind": "once", "at": "2026-01-01T24:00:00Z"}, "at"),
        ({"kind": "once", "at": "2026-01-01T23:59:60Z"}, "at"),
        ({"kind": "once", "at": "2026-01-01T00:00:00+25:00"}, "at"),
        ({"kind": "once", "at": "2026-01-01T00:00:00.1234567Z"}, "at"),
        ({"kind": "once", "at": "2026-01-01T00:00:00Z\n"}, "at"),
        ({"kind": "once", "at": "２026-01-01T00:00:00Z"}, "at"),
        ({"kind": "once", "at": "0001-01-01T00:00:00+05:00"}, "at"),
        ({"kind": "once", "at": "9999-12-31T23:59:59-05:00"}, "at"),
        ({"kind": "once", "at": "1969-12-31T23:59:59Z"}, "at"),
        ({"kind": "once", "at": datetime(2026, 1, 1)}, "at"),  # noqa: DTZ001
        ({"kind": "once", "at": "2026-01-01T00:00:00Z", "anchor": "2026-01-01T00:00:00Z"}, "anchor"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_the_person_wrote(data: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse(data, now=NOW)
    assert refusal.value.field == f"recurrence.{field}"
    assert len(str(refusal.value)) < 600


def test_something_other_than_an_object_is_refused() -> None:
    values: list[Any] = [None, [], "cron", 5]
    for data in values:
        with pytest.raises(InvalidInput) as refusal:
            parse(data, now=NOW)
        assert refusal.value.field == "recurrence"


def test_validation_gives_the_first_fire() -> None:
    def first(recurrence: Recurrence) -> datetime:
        return validate(recurrence, now=NOW, schedule_id=SCHEDULE)

    assert first(Cron("0 0 * * *", "Europe/Berlin")) == at("2026-03-28T23:00:00Z")
    assert first(Every(timedelta(seconds=5), NOW_CUT)) == NOW_CUT + timedelta(seconds=5)
    assert first(Once(at("2026-04-01T00:00:00Z"))) == at("2026-04-01T00:00:00Z")


def test_a_one_off_in_the_past_or_at_this_very_moment_is_refused() -> None:
    for instant in (NOW_CUT, at("2026-01-01T00:00:00Z")):
        with pytest.raises(InvalidInput, match=r"must be in the future; it is now 2026-03-28T12:00:00"):
            validate(Once(instant), now=NOW, schedule_id=SCHEDULE)


def test_a_cron_that_has_no_fire_left_is_refused() -> None:
    with pytest.raises(InvalidInput) as refusal:
        validate(Cron("0 0 1 1 *", "UTC"), now=at("9999-06-01T00:00:00Z"), schedule_id=SCHEDULE)
    assert refusal.value.field == "recurrence.cron"


def test_a_stored_cron_that_is_no_longer_usable_is_refused_when_it_is_asked() -> None:
    for recurrence, field in (
        (Cron("77 * * * *", "UTC"), "cron"),
        (Cron("@daily", "Mars/Olympus"), "timezone"),
    ):
        with pytest.raises(InvalidInput) as refusal:
            following(recurrence, NOW)
        assert refusal.value.field == f"recurrence.{field}"


def test_a_preview_ends_where_the_recurrence_ends() -> None:
    once = Once(at("2026-04-01T00:00:00Z"))
    assert [fire.at for fire in preview(once, NOW, 5, SCHEDULE)] == [once.at]
    assert preview(once, once.at, 5, SCHEDULE) == []
    assert preview(Cron("* * * * *", "UTC"), NOW, 0, SCHEDULE) == []
    assert len(preview(Cron("0 0 1 1 *", "UTC"), at("9995-06-01T00:00:00Z"), 9, SCHEDULE)) == 4


def test_a_preview_shows_the_local_time_with_its_offset() -> None:
    cron = preview(Cron("0 3 * * *", "Europe/Berlin"), NOW, 2, SCHEDULE)
    assert [fire.local for fire in cron] == ["2026-03-29T03:00:00+02:00", "2026-03-30T03:00:00+02:00"]
    every = preview(Every(timedelta(milliseconds=1_500), NOW_CUT), NOW, 1, SCHEDULE)
    assert (every[0].local, every[0].note) == ("2026-03-28T12:00:01.623000+00:00", None)


def test_the_hash_of_the_schedule_moves_its_fires_and_no_other_field() -> None:
    fires = {
        next_fire(Cron("H 9 * * *", "UTC"), NOW, schedule_id=ScheduleId(UUID(int=number)))
        for number in range(50)
    }
    assert len(fires) > 20
    assert {fire.hour for fire in fires if fire} == {9}
