from __future__ import annotations

import hashlib
import random
from datetime import UTC, datetime, timedelta, timezone
from uuid import RFC_4122, UUID, uuid1, uuid4
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.domain.ids import (
    EPOCH,
    MICROSECOND,
    MILLISECOND,
    ScheduleId,
    instants_of,
    is_occurrence_instant,
    manual_instant,
    microseconds,
    run_id,
)

LAST = datetime(9999, 12, 31, 23, 59, 59, 998_999, tzinfo=UTC)

schedules = st.uuids().map(ScheduleId)
instants = st.datetimes(
    min_value=EPOCH.replace(tzinfo=None), max_value=LAST.replace(tzinfo=None), timezones=st.just(UTC)
)


@given(schedules, instants)
@example(ScheduleId(UUID(int=0)), EPOCH)
@example(ScheduleId(UUID(int=2**128 - 1)), LAST)
def test_a_run_id_is_a_uuid_of_version_8_that_names_its_millisecond(
    schedule: ScheduleId, instant: datetime
) -> None:
    run = run_id(schedule, instant)
    assert (run.version, run.variant) == (8, RFC_4122)
    span = instants_of(run)
    assert span is not None
    start, end = span
    assert start <= instant < end == start + MILLISECOND
    assert start.microsecond % 1000 == 0


@given(schedules, instants, st.integers(-14 * 60, 14 * 60))
def test_one_instant_has_one_id_in_every_zones_notation(
    schedule: ScheduleId, instant: datetime, minutes: int
) -> None:
    zone = timezone(timedelta(minutes=minutes))
    try:
        elsewhere = instant.astimezone(zone)
    except OverflowError:
        return
    assert run_id(schedule, elsewhere) == run_id(schedule, instant)


def test_the_two_passes_of_a_repeated_hour_have_two_ids() -> None:
    schedule = ScheduleId(uuid4())
    berlin = ZoneInfo("Europe/Berlin")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=0)
    second = first.replace(fold=1)
    assert run_id(schedule, first.astimezone(UTC)) != run_id(schedule, second.astimezone(UTC))
    assert run_id(schedule, first) == run_id(schedule, datetime(2026, 10, 25, 0, 30, tzinfo=UTC))
    assert run_id(schedule, second) == run_id(schedule, datetime(2026, 10, 25, 1, 30, tzinfo=UTC))


@given(schedules, schedules, instants, instants)
def test_different_schedules_or_instants_have_different_ids(
    one: ScheduleId, two: ScheduleId, at: datetime, later: datetime
) -> None:
    if (one, at) != (two, later):
        assert run_id(one, at) != run_id(two, later)
    assert run_id(one, at) == run_id(ScheduleId(UUID(str(one))), at)


@given(schedules, instants)
def test_instants_within_one_millisecond_share_the_head_and_differ_in_the_rest(
    schedule: ScheduleId, instant: datetime
) -> None:
    start = instant - instant.microsecond % 1000 * MICROSECOND
    ids = [run_id(schedule, start + offset * MICROSECOND) for offset in (0, 1, 999)]
    assert len(set(ids)) == 3
    assert len({run.int >> 80 for run in ids}) == 1


@given(instants)
@example(datetime(2038, 1, 19, 3, 14, 8, 1, tzinfo=UTC))
@example(datetime(2026, 3, 4, 5, 6, 7, 289_000, tzinfo=UTC))
def test_microseconds_are_whole_and_exact(instant: datetime) -> None:
    count = microseconds(instant)
    assert EPOCH + count * MICROSECOND == instant
    assert microseconds(instant + MICROSECOND) == count + 1


def test_no_millisecond_is_off_by_one_as_with_floats() -> None:
    schedule = ScheduleId(uuid4())
    rng = random.Random(20)
    wrong_with_floats = 0
    for _ in range(5_000):
        millis = rng.randrange(4_102_444_800_000)  # to the year 2100
        instant = EPOCH + millis * MILLISECOND
        assert run_id(schedule, instant).int >> 80 == millis
        wrong_with_floats += int(instant.timestamp() * 1000) != millis
    assert wrong_with_floats > 0


def test_the_id_is_the_documented_function() -> None:
    schedule = ScheduleId(UUID("6ba7b810-9dad-41d1-80b4-00c04fd430c8"))
    instant = datetime(2026, 3, 4, 5, 6, 7, 891_000, tzinfo=UTC)
    micros = 1_772_600_767_891_000
    digest = hashlib.sha256(schedule.bytes + micros.to_bytes(8, "big")).digest()
    expected = bytearray((micros // 1000).to_bytes(6, "big") + digest[:10])
    expected[6] = 0x80 | expected[6] & 0x0F
    expected[8] = 0x80 | expected[8] & 0x3F
    assert run_id(schedule, instant).bytes == bytes(expected)


@pytest.mark.parametrize(
    ("instant", "says"),
    [(EPOCH.replace(tzinfo=None), "zone"), (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "1970")],
)
def test_an_instant_without_a_zone_or_before_1970_has_no_id(instant: datetime, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_id(ScheduleId(uuid4()), instant)


@given(st.uuids())
@example(UUID(int=0))
@example(UUID(int=2**128 - 1))
@example(UUID("ffffffff-ffff-8fff-bfff-ffffffffffff"))
@example(uuid1())
@example(uuid4())
def test_any_uuid_of_a_stranger_is_a_span_or_none_and_never_an_error(stranger: UUID) -> None:
    span = instants_of(stranger)
    if span is None:
        assert stranger.version != 8 or stranger.int >> 80 > 253_402_300_799_998
    else:
        assert stranger.version == 8
        assert EPOCH <= span[0] < span[1]


@given(instants)
def test_a_manual_instant_is_no_occurrences_and_at_most_a_microsecond_late(now: datetime) -> None:
    manual = manual_instant(now)
    assert not is_occurrence_instant(manual)
    assert now <= manual <= now + MICROSECOND
    assert is_occurrence_instant(now - now.microsecond % 1000 * MICROSECOND)
