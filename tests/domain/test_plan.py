"""The plan of one schedule, against a model that lists every occurrence one by one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.domain import plan as plans
from app.domain.ids import ScheduleId
from app.domain.plan import Due, Limits, Plan, Skipped, is_shared, plan, skip_until
from app.domain.recurrence import Cron, Every, Once, Recurrence, next_fire
from app.domain.schedule import Misfire, SkipReason

ID = ScheduleId(UUID(int=7))
START = datetime(2026, 3, 1, tzinfo=UTC)
AHEAD = timedelta(seconds=5)
FOREVER = timedelta(days=10_000)


def every(seconds: float) -> Every:
    return Every(timedelta(seconds=seconds), START)


def due(
    recurrence: Recurrence,
    *,
    misfire: Misfire = Misfire.FIRE_ONCE,
    at: datetime = START,
    expires_after: timedelta = FOREVER,
) -> Due:
    return Due(ID, recurrence, misfire, expires_after, at)


def planned(one: Due, *, now: datetime, limits: Limits | None = None) -> Plan:
    return plan(one, now=now, horizon=now + AHEAD, limits=limits or Limits())


def s(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def test_the_pointer_itself_is_the_first_occurrence() -> None:
    assert planned(due(every(60)), now=START) == Plan((START,), (), s(60))


def test_everything_up_to_the_horizon_is_planned_and_nothing_beyond() -> None:
    assert planned(due(every(1)), now=START).occurrences == tuple(s(n) for n in range(6))
    assert planned(due(every(1)), now=START).next_fire_at == s(6)


def test_a_pointer_beyond_the_horizon_is_left_alone() -> None:
    assert planned(due(every(60), at=s(60)), now=START) == Plan((), (), s(60))


def test_late_within_the_grace_is_late_and_not_lost() -> None:
    result = planned(due(every(10), misfire=Misfire.SKIP), now=s(60))
    assert result.occurrences == tuple(s(n) for n in range(0, 61, 10))
    assert result.skipped == ()


def test_the_grace_ends_exactly_where_it_says() -> None:
    rule = due(Once(START), misfire=Misfire.SKIP)
    at_the_edge = planned(rule, now=s(60))
    assert at_the_edge.occurrences == (START,)
    beyond = planned(rule, now=s(60) + timedelta(microseconds=1))
    assert beyond == Plan((), (Skipped(START, START, 1, SkipReason.MISFIRE),), None)


def test_fire_once_makes_up_for_the_latest_missed_occurrence_only() -> None:
    result = planned(due(Cron("0 * * * *", "UTC")), now=s(5 * 3600 + 1800))
    assert result.occurrences == (s(5 * 3600),)
    assert result.skipped == (Skipped(START, s(4 * 3600), 5, SkipReason.MISFIRE),)
    assert result.next_fire_at == s(6 * 3600)


def test_skip_makes_up_for_none_but_records_all() -> None:
    result = planned(due(Cron("0 * * * *", "UTC"), misfire=Misfire.SKIP), now=s(5 * 3600 + 1800))
    assert result == Plan((), (Skipped(START, s(5 * 3600), 6, SkipReason.MISFIRE),), s(6 * 3600))


def test_fire_all_makes_up_for_all_within_its_bound() -> None:
    rule = due(Cron("* * * * *", "UTC"), misfire=Misfire.FIRE_ALL)
    few = planned(rule, now=s(3600))
    assert few.occurrences == tuple(s(60 * n) for n in range(61))
    many = planned(rule, now=s(3 * 3600))
    assert len(many.occurrences) == 100 + 2  # the latest hundred, and the two within the grace
    assert many.skipped == (Skipped(START, s(60 * 78), 79, SkipReason.MISFIRE),)
    assert many.occurrences[0] == s(60 * 79)


def test_what_could_not_start_any_more_is_recorded_as_expired() -> None:
    rule = due(Cron("0 * * * *", "UTC"), misfire=Misfire.FIRE_ALL, expires_after=timedelta(hours=2))
    result = planned(rule, now=s(5 * 3600))
    assert result.skipped == (Skipped(START, s(3 * 3600), 4, SkipReason.EXPIRED),)
    assert result.occurrences == (s(4 * 3600), s(5 * 3600))


def test_what_is_older_than_the_attached_months_is_recorded_as_too_old() -> None:
    rule = due(Cron("0 * * * *", "UTC"), misfire=Misfire.FIRE_ALL)
    result = planned(rule, now=s(5 * 3600), limits=Limits(oldest=s(3 * 3600)))
    assert result.skipped == (Skipped(START, s(2 * 3600), 3, SkipReason.TOO_OLD),)
    assert result.occurrences == (s(3 * 3600), s(4 * 3600), s(5 * 3600))


def test_a_one_off_is_planned_and_then_finished() -> None:
    assert planned(due(Once(START)), now=START) == Plan((START,), (), None)


def test_years_of_missed_seconds_are_counted_and_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(recurrence: Recurrence, after: datetime, *, schedule_id: ScheduleId) -> datetime | None:
        nonlocal calls
        calls += 1
        return next_fire(recurrence, after, schedule_id=schedule_id)

    monkeypatch.setattr(plans, "next_fire", counted)
    year = 365 * 86_400
    result = planned(due(every(1)), now=s(year))
    assert result.skipped == (Skipped(START, s(year - 62), year - 61, SkipReason.MISFIRE),)
    assert result.occurrences[0] == s(year - 61)
    assert result.next_fire_at == s(year + 6)
    assert calls < 100


def test_a_pointer_beside_the_grid_is_one_occurrence_and_the_grid_goes_on() -> None:
    rule = due(every(10), at=s(3), misfire=Misfire.SKIP)
    result = planned(rule, now=s(100))
    assert result.skipped == (Skipped(s(3), s(30), 4, SkipReason.MISFIRE),)
    assert result.occurrences[0] == s(40)


def test_a_call_walks_no_further_than_its_bound_and_the_next_goes_on() -> None:
    rule = due(Cron("* * * * *", "UTC"), misfire=Misfire.SKIP)
    limits = Limits(walked=10, caught_up=3)
    first = planned(rule, now=s(3600), limits=limits)
    assert first == Plan((), (Skipped(START, s(9 * 60), 10, SkipReason.MISFIRE),), s(10 * 60))


@pytest.mark.parametrize(("misfire", "held_back"), [(Misfire.FIRE_ONCE, 1), (Misfire.FIRE_ALL, 3)])
def test_a_stretch_that_does_not_reach_the_present_decides_nothing_about_its_latest(
    misfire: Misfire, held_back: int
) -> None:
    rule = due(Cron("* * * * *", "UTC"), misfire=misfire)
    first = planned(rule, now=s(3600), limits=Limits(walked=10, caught_up=3))
    assert first.occurrences == ()
    assert first.next_fire_at == s((10 - held_back) * 60)


@pytest.mark.parametrize(
    "pointer", [START + timedelta(microseconds=1), START + timedelta(microseconds=999_999)]
)
def test_a_pointer_that_no_occurrence_can_have_is_refused(pointer: datetime) -> None:
    with pytest.raises(ValueError, match="whole millisecond"):
        planned(due(every(1), at=pointer), now=s(10))


@pytest.mark.parametrize("step", [timedelta(0), timedelta(seconds=-1)])
@pytest.mark.parametrize("late", [0, 3600])
def test_a_rule_that_does_not_move_forward_is_refused_and_not_followed(
    monkeypatch: pytest.MonkeyPatch, step: timedelta, late: int
) -> None:
    monkeypatch.setattr(plans, "next_fire", lambda _rule, after, **_: after + step)
    with pytest.raises(ValueError, match="does not move forward"):
        planned(due(Cron("* * * * *", "UTC")), now=s(late))


def test_limits_that_could_never_advance_are_refused() -> None:
    with pytest.raises(ValueError, match="hold back"):
        Limits(walked=100, caught_up=100)


def test_only_a_hashed_cron_depends_on_its_schedule() -> None:
    assert is_shared(Cron("0 12 * MAR THU", "UTC"))
    assert is_shared(every(5))
    assert not is_shared(Cron("H * * * *", "UTC"))


def test_an_edit_finds_nothing_to_skip_before_the_pointer() -> None:
    rule = due(every(60), at=s(60))
    assert skip_until(rule, now=s(59), reason=SkipReason.PAUSED) is None
    assert skip_until(rule, now=s(60), reason=SkipReason.PAUSED) == Skipped(
        s(60), s(60), 1, SkipReason.PAUSED
    )


def test_a_stretch_too_long_to_count_ends_at_now_and_says_at_least() -> None:
    rule = due(Cron("* * * * *", "UTC"))
    now = s(86_400) + timedelta(microseconds=1_500)
    assert skip_until(rule, now=now, reason=SkipReason.PAUSED, walked=10) == Skipped(
        START, s(86_400) + timedelta(milliseconds=1), 10, SkipReason.PAUSED
    )


def listed(recurrence: Recurrence, first: datetime, until: datetime) -> list[datetime]:
    """The model: every occurrence from `first` to `until`, one by one."""
    result = []
    at: datetime | None = first
    while at is not None and at <= until:
        result.append(at)
        at = next_fire(recurrence, at, schedule_id=ID)
    return result


RULES = st.one_of(
    st.sampled_from(
        [
            Cron("* * * * *", "UTC"),
            Cron("*/7 3-5 * * *", "Europe/Berlin"),
            Cron("H/9 * * * *", "Asia/Kolkata"),
        ]
    ),
    st.integers(1_000, 400_000).map(lambda ms: Every(timedelta(milliseconds=ms), START)),
    st.just(Once(START)),
)


@example(
    rule=Every(timedelta(seconds=1), START),
    misfire=Misfire.FIRE_ALL,
    gaps=[3600, 1],
    walked=4,
    old=0,
    life=10,
)
@given(
    rule=RULES,
    misfire=st.sampled_from(Misfire),
    gaps=st.lists(st.integers(0, 20_000), min_size=1, max_size=8),
    walked=st.integers(4, 40),
    old=st.integers(0, 20_000),
    life=st.integers(1, 100_000),
)
def test_chunked_ticks_account_for_every_occurrence_exactly_once_in_order(
    rule: Recurrence, misfire: Misfire, gaps: list[int], walked: int, old: int, life: int
) -> None:
    """Turns at any times, each repeated until nothing moves: no occurrence is lost, doubled or out of
    order.
    """
    first = next_fire(rule, START - timedelta(seconds=1), schedule_id=ID)
    assert first is not None
    pointer: datetime | None = first
    limits = Limits(walked=walked, caught_up=3, oldest=s(old))
    now = START
    fired: list[datetime] = []
    skipped: list[Skipped] = []
    for gap in gaps:
        now += timedelta(seconds=gap)
        while pointer is not None and pointer <= now + AHEAD:
            one = due(rule, misfire=misfire, at=pointer, expires_after=timedelta(seconds=life))
            result = planned(one, now=now, limits=limits)
            assert result.next_fire_at is None or result.next_fire_at > pointer
            assert all(at <= now + AHEAD for at in result.occurrences)
            assert all(at >= limits.oldest for at in result.occurrences)
            assert all(at + one.expires_after > now for at in result.occurrences)
            missed = [at for at in result.occurrences if at < now - limits.misfire_grace]
            assert len(missed) <= {Misfire.SKIP: 0, Misfire.FIRE_ONCE: 1, Misfire.FIRE_ALL: 3}[misfire]
            fired += result.occurrences
            skipped += result.skipped
            pointer = result.next_fire_at
    model = listed(rule, first, now + AHEAD)
    covered = [at for one in skipped for at in model if one.first_at <= at <= one.last_at]
    assert sorted([*fired, *covered]) == model
    assert sum(one.count for one in skipped) == len(covered)
    assert all(earlier < later for earlier, later in pairwise(fired))
    assert pointer == (next_fire(rule, model[-1], schedule_id=ID) if model else first)


@given(rule=RULES, misfire=st.sampled_from(Misfire), late=st.integers(0, 30_000))
def test_small_chunks_decide_like_one_large_one(rule: Recurrence, misfire: Misfire, late: int) -> None:
    """Which occurrences are made up for does not depend on how far one call may walk."""
    first = next_fire(rule, START - timedelta(seconds=1), schedule_id=ID)
    assert first is not None
    now = s(late)

    def fired(limits: Limits) -> list[datetime]:
        result: list[datetime] = []
        one = due(rule, misfire=misfire, at=first)
        while one.next_fire_at <= now + AHEAD:
            step = planned(one, now=now, limits=limits)
            result += step.occurrences
            if step.next_fire_at is None:
                break
            one = replace(one, next_fire_at=step.next_fire_at)
        return result

    assert fired(Limits(walked=4, caught_up=3)) == fired(Limits(walked=100_000, caught_up=3))


@given(rule=RULES, late=st.integers(0, 30_000))
def test_what_an_edit_skips_is_what_the_model_lists(rule: Recurrence, late: int) -> None:
    first = next_fire(rule, START - timedelta(seconds=1), schedule_id=ID)
    assert first is not None
    model = listed(rule, first, s(late))
    skipped = skip_until(due(rule, at=first), now=s(late), reason=SkipReason.PAUSED)
    if not model:
        assert skipped is None
    else:
        assert skipped == Skipped(model[0], model[-1], len(model), SkipReason.PAUSED)
