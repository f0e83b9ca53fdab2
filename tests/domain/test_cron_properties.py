"""What holds for every expression in every zone, against an oracle that shares no code with the walk."""

from datetime import UTC, date, datetime, timedelta
from itertools import islice
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.domain import zones
from app.domain.ids import ScheduleId
from app.domain.recurrence import Cron, next_fire
from tests.domain.oracle import Spec, fires_between, rules, transitions, walls_after

SCHEDULE = ScheduleId(UUID(int=1))
SECOND = timedelta(seconds=1)


def distinct_zones() -> list[str]:
    """Zones whose clocks change, one name for all that have moved alike since 2000."""
    alike: dict[tuple[object, ...], str] = {}
    for name in sorted(zones.names()):
        if changes := transitions(name, 2000, 2037):
            zone = zones.load(name)
            alike.setdefault((changes, *(change.astimezone(zone).utcoffset() for change in changes)), name)
    return list(alike.values())


CHANGING = distinct_zones()
ROWS_OF_CRON = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day", 1, 31),
    ("month", 1, 12),
    ("weekday", 0, 6),
)


def following(text: str, zone: str, after: datetime) -> datetime:
    at = next_fire(Cron(text, zone), after, schedule_id=SCHEDULE)
    assert at is not None
    return at


@st.composite
def parts(draw: st.DrawFn, low: int, high: int, *, step_high: int) -> tuple[str, frozenset[int]]:
    """One field as text, with the values it stands for by the rules of crontab(5)."""
    shape = draw(st.sampled_from(["*", "*/n", "a", "a-b", "a-b/n", "wrapped", "list"]))
    first = draw(st.integers(low, high))
    last = draw(st.integers(first, high))
    step = draw(st.integers(2, step_high))
    every = range(low, high + 1)
    text, values = f"{first}", [first]
    match shape:
        case "*":
            text, values = "*", list(every)
        case "*/n":
            text, values = f"*/{step}", list(every[::step])
        case "a-b" if first < last:
            text, values = f"{first}-{last}", list(range(first, last + 1))
        case "a-b/n" if first < last:
            text, values = f"{first}-{last}/{step}", list(range(first, last + 1, step))
        case "wrapped" if first < last:
            text, values = f"{last}-{first}", [*range(last, high + 1), *range(low, first + 1)]
        case "list":
            values = draw(st.lists(st.integers(low, high), min_size=2, max_size=4))
            text = ",".join(map(str, values))
    return text, frozenset(values)


@st.composite
def times_of_day(draw: st.DrawFn) -> Spec:
    """Any minutes and hours, every day: what clock changes are about."""
    minute, minutes = draw(parts(0, 59, step_high=30))
    hour, hours = draw(parts(0, 23, step_high=12))
    return Spec(f"{minute} {hour} * * *", minutes, hours)


@st.composite
def calendars(draw: st.DrawFn) -> Spec:
    """Any of the five fields."""
    texts, sets = zip(*(draw(parts(low, high, step_high=5)) for _, low, high in ROWS_OF_CRON), strict=True)
    minutes, hours, days, months, weekdays = sets
    return Spec(" ".join(texts), minutes, hours, days, months, weekdays)


def has_days(spec: Spec) -> bool:
    """False for what is refused, such as the 31st of April. 2000 has every day of the year."""
    return any(spec.matches_day(date(2000, 1, 1) + timedelta(days=day)) for day in range(366))


@st.composite
def moments_near_a_change(draw: st.DrawFn) -> tuple[str, datetime]:
    """A zone and an instant within three hours of a change of its clock."""
    name = draw(st.sampled_from(CHANGING))
    change = draw(st.sampled_from(transitions(name, 2000, 2037)))
    return name, change + draw(st.integers(-10_800, 10_800)) * SECOND


@settings(deadline=None, max_examples=100)
@given(times_of_day(), moments_near_a_change())
def test_around_every_change_of_the_clock_the_fires_are_those_of_a_daemon_that_watches_it(
    spec: Spec, moment: tuple[str, datetime]
) -> None:
    name, start = moment
    end = start + timedelta(hours=8)
    expected = fires_between(spec, rules(name), start.replace(second=0), end)
    found: list[datetime] = []
    at = following(spec.text, name, start.replace(second=0))
    while at <= end:
        found.append(at)
        at = following(spec.text, name, at)
    assert found == expected


@settings(deadline=None, max_examples=30)
@given(times_of_day(), st.sampled_from(["Pacific/Apia", "Pacific/Fakaofo"]), st.integers(-1_500, 1_500))
def test_a_zone_that_skips_a_day_loses_no_fixed_time(spec: Spec, name: str, minutes: int) -> None:
    start = datetime(2011, 12, 30, 10, tzinfo=UTC) + timedelta(minutes=minutes)
    end = start + timedelta(hours=30)
    found: list[datetime] = []
    at = following(spec.text, name, start)
    while at <= end:
        found.append(at)
        at = following(spec.text, name, at)
    assert found == fires_between(spec, rules(name), start, end)


@settings(deadline=None)
@given(calendars(), st.datetimes(datetime(1999, 1, 1), datetime(2120, 1, 1)))  # noqa: DTZ001
def test_in_utc_the_fires_are_those_of_a_plain_search_through_the_calendar(
    spec: Spec, after: datetime
) -> None:
    assume(has_days(spec))
    at = after.replace(tzinfo=UTC)
    for wall in islice(walls_after(spec, after, 30), 3):
        at = following(spec.text, "UTC", at)
        assert at == wall.replace(tzinfo=UTC)


@settings(deadline=None)
@given(calendars(), moments_near_a_change())
def test_fires_strictly_increase_are_whole_seconds_and_show_a_time_that_exists(
    spec: Spec, moment: tuple[str, datetime]
) -> None:
    assume(has_days(spec))
    name, at = moment
    zone = zones.load(name)
    for _ in range(6):
        following_at = following(spec.text, name, at)
        assert following_at > at
        assert following_at.tzinfo is UTC
        assert following_at.microsecond == 0
        assert following_at.astimezone(zone).astimezone(UTC) == following_at
        at = following_at


@settings(deadline=None)
@given(times_of_day(), moments_near_a_change(), st.integers(0, 999_999))
def test_nothing_lies_between_a_fire_and_the_answer_asked_from_anywhere_before_it(
    spec: Spec, moment: tuple[str, datetime], microsecond: int
) -> None:
    name, asked = moment
    asked = asked.replace(microsecond=microsecond)
    at = following(spec.text, name, asked)
    assert following(spec.text, name, at - timedelta(microseconds=1)) == at
    assert following(spec.text, name, asked + (at - asked) / 2) == at
    assert following(spec.text, name, at) > at


@settings(deadline=None)
@given(times_of_day(), moments_near_a_change())
def test_the_notation_of_the_instant_does_not_matter(spec: Spec, moment: tuple[str, datetime]) -> None:
    name, asked = moment
    answer = following(spec.text, name, asked)
    assert following(spec.text, name, asked.astimezone(zones.load(name))) == answer
    assert following(spec.text, name, asked.astimezone(ZoneInfo("Asia/Kathmandu"))) == answer


@pytest.mark.parametrize("text", ["30 1 * * *", "0 2 * * *", "30 2 * * *", "0 3 * * *", "0 0 * * *"])
@pytest.mark.parametrize("year", [2025, 2026, 2027])
def test_a_daily_fixed_time_fires_once_for_each_local_day_in_every_zone(text: str, year: int) -> None:
    for name in CHANGING:
        zone = zones.load(name)
        for change in transitions(name, year, year):
            day = change.astimezone(zone).date()
            at = datetime(day.year, day.month, day.day, tzinfo=UTC) - timedelta(days=2)
            fires: list[datetime] = []
            while len(fires) < 6:
                at = following(text, name, at)
                fires.append(at)
            days = [fire.astimezone(zone).date() for fire in fires]
            assert days == [days[0] + timedelta(days=count) for count in range(6)], (text, name, day)


@pytest.mark.parametrize("text", ["*/15 * * * *", "*/5 * * * *", "* * * * *"])
def test_a_rhythm_within_the_hour_never_pauses_where_clocks_move_by_quarters(text: str) -> None:
    for name in CHANGING:
        for change in transitions(name, 2025, 2026):
            at = change - timedelta(hours=1)
            steps = set()
            for _ in range(12):
                following_at = following(text, name, at)
                steps.add(following_at - at)
                at = following_at
            assert len(steps) == 1, (text, name, change)


def test_every_zone_answers_just_before_and_just_after_every_change_of_these_years() -> None:
    for name in CHANGING:
        for change in transitions(name, 2025, 2028):
            for text in ("30 2 * * *", "*/30 * * * *", "0 */2 * * *"):
                for offset in (-3600, -1, 0, 1, 1800, 3599, 3600):
                    asked = change + offset * SECOND
                    assert following(text, name, asked) > asked


def moves_on_the_hour(name: str) -> bool:
    """Where cronsim's own walk can be followed: not Chatham's 02:45, nor Lord Howe's half hour.

    See `docs/decisions/cron-libraries.md`.
    """
    changes = transitions(name, 2020, 2030)
    moments = [moment.astimezone(rules(name)) for change in changes for moment in (change, change - SECOND)]
    return bool(changes) and {moment.minute for moment in moments} == {0, 59}


SECOND_OPINION_ZONES = [name for name in CHANGING if moves_on_the_hour(name)]


@settings(deadline=None)
@given(calendars(), st.sampled_from(SECOND_OPINION_ZONES), st.data())
def test_cronsim_agrees_when_it_walks_the_zone_itself(spec: Spec, name: str, data: st.DataObject) -> None:
    assume(has_days(spec))
    assume(all(_rises(part) for part in spec.text.split()))
    changes = transitions(name, 2020, 2030)
    assume(changes)
    asked = data.draw(st.sampled_from(changes)) + data.draw(st.integers(-180, 180)) * timedelta(minutes=1)
    theirs = next(
        at for at in CronSim(spec.text, asked.astimezone(rules(name))) if at.astimezone(UTC) > asked
    )
    assume(theirs.astimezone(UTC).astimezone(rules(name)).replace(tzinfo=None) == theirs.replace(tzinfo=None))
    assert following(spec.text, name, asked) == theirs.astimezone(UTC)


def _rises(part: str) -> bool:
    low, _, high = part.partition("/")[0].partition("-")
    return not high or int(low) < int(high)
