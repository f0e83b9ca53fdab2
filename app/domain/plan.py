"""From a due schedule to its runs: which occurrences get one, which get a disposition, and where the rule
goes on.

The pointer `next_fire_at` is itself the first occurrence not planned yet. Everything up to the horizon is
accounted for exactly once: by a run, or by a stretch that says why not. How late an occurrence is decides:

    younger than `misfire_grace`     late is late, not lost: it gets its run
    older                            the schedule's misfire policy decides
    any age, but expired             its run could not start any more: recorded as such
    before the oldest attached month the unique guard no longer covers it: recorded, never planned

The work of one call is bounded. A missed stretch that does not reach the present within the bound is recorded
as far as it went and the pointer stops there; only the call that does reach it knows which occurrences are
the latest ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never

from app.domain.cron_text import uses_hash
from app.domain.ids import EPOCH, MICROSECOND, ScheduleId, is_occurrence_instant
from app.domain.recurrence import Cron, Every, Recurrence, next_fire
from app.domain.schedule import Misfire, SkipReason


@dataclass(frozen=True, slots=True)
class Due:
    """What planning must know of one schedule."""

    id: ScheduleId
    recurrence: Recurrence
    misfire: Misfire
    expires_after: timedelta
    next_fire_at: datetime


@dataclass(frozen=True, slots=True)
class Limits:
    """`walked` bounds the occurrences looked at per call (intervals are counted, not walked), `caught_up`
    those that FIRE_ALL makes up for. `oldest` is the start of the attached months.
    """

    misfire_grace: timedelta = timedelta(seconds=60)
    walked: int = 1_000
    caught_up: int = 100
    oldest: datetime = EPOCH

    def __post_init__(self) -> None:
        if not 1 <= self.caught_up < self.walked:
            raise ValueError("a call must walk further than the occurrences it may have to hold back")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A gapless stretch of occurrences, both ends included, that get no run for the same reason."""

    first_at: datetime
    last_at: datetime
    count: int
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class Plan:
    """`next_fire_at` is the first occurrence that this plan does not account for; None when there is none."""

    occurrences: tuple[datetime, ...]
    skipped: tuple[Skipped, ...]
    next_fire_at: datetime | None


def plan(due: Due, *, now: datetime, horizon: datetime, limits: Limits) -> Plan:
    """Account for the occurrences from the pointer to `horizon` (inclusive, not before `now`).

    Raises ValueError for a pointer that is no whole millisecond and for a rule that does not move forward,
    and whatever the rule itself raises: such a schedule cannot be planned at all.
    """
    if not is_occurrence_instant(due.next_fire_at):
        raise ValueError(f"next_fire_at is not a whole millisecond: {due.next_fire_at.isoformat()}")
    at: datetime | None = due.next_fire_at
    candidates: tuple[datetime, ...] = ()
    skipped: list[Skipped] = []
    missed_before = now - limits.misfire_grace
    if due.next_fire_at < missed_before:
        missed = _walk(due, before=missed_before, limit=limits.walked, keep=_kept(due.misfire, limits))
        if missed.last_dropped is not None:
            skipped.append(Skipped(due.next_fire_at, missed.last_dropped, missed.dropped, SkipReason.MISFIRE))
        if not missed.is_complete:
            return Plan((), tuple(skipped), missed.goes_on_at)
        at = missed.goes_on_at
        candidates = missed.kept
    present: list[datetime] = []
    while at is not None and at <= horizon and len(present) < limits.walked:
        present.append(at)
        at = _next(due, at)
    return _judge(due, (*candidates, *present), skipped, at, now=now, oldest=limits.oldest)


def is_shared(recurrence: Recurrence) -> bool:
    """True when the rule means the same for every schedule: equal pointers and policies then give equal
    plans.
    """
    return not (isinstance(recurrence, Cron) and uses_hash(recurrence.expression))


def skip_until(due: Due, *, now: datetime, reason: SkipReason, walked: int = 10_000) -> Skipped | None:
    """The stretch from the pointer to `now` (inclusive), for occurrences that an edit takes away; None when
    empty.

    Intervals are counted exactly. Of a cron rule at most `walked` occurrences are counted: a longer stretch
    ends at `now`, and its count says "at least". Raises like `plan`.
    """
    if due.next_fire_at > now:
        return None
    stretch = _walk(due, before=now + MICROSECOND, limit=walked, keep=0)
    assert stretch.last_dropped is not None
    if stretch.is_complete:
        return Skipped(due.next_fire_at, stretch.last_dropped, stretch.dropped, reason)
    whole = now.replace(microsecond=now.microsecond // 1000 * 1000)
    return Skipped(due.next_fire_at, whole, stretch.dropped, reason)


def _kept(misfire: Misfire, limits: Limits) -> int:
    match misfire:
        case Misfire.FIRE_ONCE:
            return 1
        case Misfire.FIRE_ALL:
            return limits.caught_up
        case Misfire.SKIP:
            return 0
        case _:
            assert_never(misfire)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Occurrences before some instant: the first ones dropped, the last ones kept.

    `goes_on_at` is the first occurrence that is neither. An incomplete stretch (the bound came first) keeps
    none: the rule goes on at what it would have kept, so that the next call can keep it.
    """

    last_dropped: datetime | None
    dropped: int
    kept: tuple[datetime, ...]
    goes_on_at: datetime | None
    is_complete: bool


def _walk(due: Due, *, before: datetime, limit: int, keep: int) -> _Stretch:
    """The stretch from the pointer (which lies in it) to `before` (exclusive), at most `limit` > `keep`
    long.
    """
    if isinstance(due.recurrence, Every):
        return _count(due, due.recurrence.interval, before=before, keep=keep)
    walked = [due.next_fire_at]
    following = _next(due, due.next_fire_at)
    while following is not None and following < before and len(walked) < limit:
        walked.append(following)
        following = _next(due, following)
    dropped = max(len(walked) - keep, 0)
    last_dropped = walked[dropped - 1] if dropped else None
    if following is None or following >= before:
        return _Stretch(last_dropped, dropped, tuple(walked[dropped:]), following, is_complete=True)
    goes_on_at = walked[dropped] if keep else following
    return _Stretch(last_dropped, dropped, (), goes_on_at, is_complete=False)


def _count(due: Due, interval: timedelta, *, before: datetime, keep: int) -> _Stretch:
    """`_walk` for intervals, by arithmetic: years of missed seconds cost as much as one."""
    second = _next(due, due.next_fire_at)
    later = 0
    if second is not None and second < before:
        later = (before - MICROSECOND - second) // interval + 1

    def nth(n: int) -> datetime:
        """The pointer is the 0th; it need not lie on the grid, all others do."""
        if n == 0 or second is None:
            return due.next_fire_at
        return second + (n - 1) * interval

    dropped = max(1 + later - keep, 0)
    return _Stretch(
        last_dropped=nth(dropped - 1) if dropped else None,
        dropped=dropped,
        kept=tuple(nth(n) for n in range(dropped, 1 + later)),
        goes_on_at=second if later == 0 else _next(due, nth(later)),
        is_complete=True,
    )


def _judge(
    due: Due,
    candidates: tuple[datetime, ...],
    skipped: list[Skipped],
    next_fire_at: datetime | None,
    *,
    now: datetime,
    oldest: datetime,
) -> Plan:
    """Candidates are gapless and increasing, so both kinds of "too late" are a stretch at their beginning."""
    too_old = bisect_left(candidates, oldest)
    expired = max(too_old, bisect_right(candidates, now - due.expires_after))
    for stretch, reason in (
        (candidates[:too_old], SkipReason.TOO_OLD),
        (candidates[too_old:expired], SkipReason.EXPIRED),
    ):
        if stretch:
            skipped.append(Skipped(stretch[0], stretch[-1], len(stretch), reason))
    return Plan(candidates[expired:], tuple(skipped), next_fire_at)


def _next(due: Due, after: datetime) -> datetime | None:
    following = next_fire(due.recurrence, after, schedule_id=due.id)
    if following is not None and following <= after:
        raise ValueError(
            f"the rule does not move forward: {after.isoformat()} is followed by {following.isoformat()}"
        )
    return following
