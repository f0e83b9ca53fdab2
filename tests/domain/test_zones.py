"""Zones: which names are zones, and what happens to a wall time around a change of the clock."""

import zoneinfo
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

import pytest
import tzdata  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from app.domain import zones
from app.errors import InvalidInput
from tests.domain.oracle import transitions


def naive(text: str) -> datetime:
    return datetime.fromisoformat(text)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "UTC ",
        " UTC",
        "utc",
        "europe/berlin",
        "Europe",
        "Europe/",
        "/Europe/Berlin",
        "Europe//Berlin",
        "Europe/../Europe/Berlin",
        "./UTC",
        "../zones",
        "/etc/localtime",
        "localtime",
        "posixrules",
        "zone.tab",
        "Factory",
        "tzdata.zi",
        "__init__.py",
        "Europe/__init__.py",
        "C:\\Windows",
        "UTC\0",
        "\0",
        "UTC\n",
        "EST5EDT4,M3.2.0,M11.1.0",
        "+02:00",
        "GMT+25",
        "ＵＴＣ",
        "Europe/Berlin" * 10_000,
        "\ud800",
    ],
)
def test_anything_but_an_exact_iana_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        zones.load(name)
    assert refusal.value.field == "recurrence.timezone"
    assert len(str(refusal.value)) < 600


def test_a_name_in_the_wrong_case_is_answered_with_the_right_one() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'America/New_York'"):
        zones.load("america/new_york")


def test_every_name_can_be_loaded_and_is_known_to_the_standard_library() -> None:
    assert zones.names() <= available_timezones()  # which adds the machine's own, such as localtime
    assert {"UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires"} <= zones.names()
    noon = datetime(2026, 7, 1, 12, tzinfo=UTC)
    for name in zones.names():
        assert noon.astimezone(zones.load(name)).utcoffset() is not None


def test_the_release_of_the_rules_is_the_one_of_the_locked_package() -> None:
    assert zones.TZDATA_VERSION == tzdata.IANA_VERSION


def test_the_rules_of_the_machine_are_not_asked(tmp_path: Path) -> None:
    (tmp_path / "Europe").mkdir()
    tokyo = files("tzdata").joinpath("zoneinfo", "Asia", "Tokyo").read_bytes()
    (tmp_path / "Europe" / "Vilnius").write_bytes(tokyo)
    zoneinfo.reset_tzpath([tmp_path])
    try:
        ZoneInfo.clear_cache(only_keys=["Europe/Vilnius"])
        noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
        assert noon.astimezone(ZoneInfo("Europe/Vilnius")).utcoffset() == timedelta(hours=9)
        assert noon.astimezone(zones.load("Europe/Vilnius")).utcoffset() == timedelta(hours=2)
    finally:
        zoneinfo.reset_tzpath()
        ZoneInfo.clear_cache(only_keys=["Europe/Vilnius"])


def test_a_wall_time_happens_never_once_or_twice() -> None:
    berlin = zones.load("Europe/Berlin")
    assert zones.instants(naive("2026-03-29T02:30"), berlin) == ()
    assert zones.instants(naive("2026-03-29T03:00"), berlin) == (utc("2026-03-29T01:00"),)
    assert zones.instants(naive("2026-10-25T02:30"), berlin) == (
        utc("2026-10-25T00:30"),
        utc("2026-10-25T01:30"),
    )
    assert zones.instants(naive("2026-10-25T03:00"), berlin) == (utc("2026-10-25T02:00"),)


@pytest.mark.parametrize(
    ("zone", "skipped", "jump", "length"),
    [
        ("Europe/Berlin", "2026-03-29T02:00", "2026-03-29T01:00", timedelta(hours=1)),
        ("Europe/Berlin", "2026-03-29T02:59:59", "2026-03-29T01:00", timedelta(hours=1)),
        ("Australia/Lord_Howe", "2026-10-04T02:15", "2026-10-03T15:30", timedelta(minutes=30)),
        ("Africa/Cairo", "2026-04-24T00:00", "2026-04-23T22:00", timedelta(hours=1)),
        ("Pacific/Apia", "2011-12-30T12:00", "2011-12-30T10:00", timedelta(days=1)),
        ("Africa/Monrovia", "1972-01-07T00:30", "1972-01-07T00:44:30", timedelta(minutes=44, seconds=30)),
        ("Asia/Pyongyang", "2018-05-04T23:45", "2018-05-04T15:00", timedelta(minutes=30)),
    ],
)
def test_a_skipped_wall_time_leads_to_the_jump_over_it(
    zone: str, skipped: str, jump: str, length: timedelta
) -> None:
    assert zones.gap(naive(skipped), zones.load(zone)) == (utc(jump), length)


def test_asking_for_the_jump_over_a_time_that_exists_is_a_fault() -> None:
    for existing in ("2026-07-01T12:00", "2026-10-25T02:30"):
        with pytest.raises(ValueError, match="exists"):
            zones.gap(naive(existing), zones.load("Europe/Berlin"))


def test_an_instant_without_a_zone_is_a_fault() -> None:
    with pytest.raises(ValueError, match="needs a zone"):
        zones.utc(naive("2026-01-01T00:00"))


def test_an_instant_beyond_the_calendar_becomes_its_edge() -> None:
    assert zones.utc(datetime.fromisoformat("9999-12-31T23:30:00-05:00")) == datetime.max.replace(tzinfo=UTC)
    assert zones.utc(datetime.fromisoformat("0001-01-01T00:30:00+05:00")) == datetime.min.replace(tzinfo=UTC)


@given(
    st.sampled_from(sorted(zones.names())),
    st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2100, 1, 1)),  # noqa: DTZ001
)
def test_every_instant_is_among_those_of_its_own_wall_time(name: str, moment: datetime) -> None:
    zone, instant = zones.load(name), moment.replace(microsecond=0, tzinfo=UTC)
    happens = zones.instants(zones.wall(instant, zone), zone)
    assert instant in happens
    assert list(happens) == sorted(happens)
    assert zones.repeats_after(zones.wall(instant, zone), zone) == happens[-1] - happens[0]


@given(st.sampled_from(sorted(zones.names())), st.data())
def test_at_every_change_of_the_clock_the_jump_found_is_the_change(name: str, data: st.DataObject) -> None:
    changes = transitions(name)
    if not changes:
        return
    zone, change = zones.load(name), data.draw(st.sampled_from(changes))
    lands = zones.wall(change, zone)
    last = zones.wall(change - timedelta(seconds=1), zone)
    if lands - last > timedelta(seconds=1):
        assert zones.gap(lands - timedelta(seconds=1), zone) == (change, lands - last - timedelta(seconds=1))
    else:
        assert zones.instants(lands, zone)[-1] == change
