from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from app.domain import recurrence as recurrences
from app.domain.ids import ScheduleId, TenantId, run_id
from app.domain.plan import Limits
from app.domain.recurrence import Cron, Recurrence
from app.planner.draft import Drafts, draft_all
from app.store.planning import DueRow
from tests import factories_schedules as make

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def row(rule: Recurrence = make.HOURLY, *, at: datetime = NOW, **columns: object) -> DueRow:
    values: dict[str, object] = {
        "id": ScheduleId(uuid4()),
        "tenant_id": TenantId(uuid4()),
        "version": 3,
        "next_fire_at": at,
        "recurrence": json.dumps(recurrences.to_json(rule)),
        "retry": '{"max_attempts": 5, "base_seconds": 10, "factor": 2, "cap_seconds": 3600}',
        "misfire": "fire_once",
        "expires_after": timedelta(days=1),
    }
    return DueRow(**(values | columns))  # type: ignore[arg-type]


def drafted(rows: list[DueRow], *, runs_at_most: int = 5_000, ticks: float = 0.0) -> Drafts:
    """With a clock that shows `ticks` more seconds at every look."""
    looks = iter(range(1_000_000))
    return draft_all(
        rows,
        now=NOW,
        horizon=NOW + timedelta(seconds=5),
        limits=Limits(),
        runs_at_most=runs_at_most,
        budget=timedelta(seconds=1),
        clock=lambda: next(looks) * ticks,
    )


def test_a_draft_is_the_run_and_where_the_rule_goes_on() -> None:
    one = row()
    [draft] = drafted([one]).drafts
    [run] = draft.runs
    assert (run.id, run.scheduled_for, run.schedule_id, run.tenant_id) == (
        run_id(one.id, NOW),
        NOW,
        one.id,
        one.tenant_id,
    )
    assert (run.schedule_version, run.max_attempts, run.expires_at) == (3, 5, NOW + timedelta(days=1))
    assert draft.next_fire_at == NOW + timedelta(hours=1)


@pytest.mark.parametrize(
    "columns",
    [
        {"recurrence": '{"kind": "moon"}'},
        {"recurrence": "not json"},
        {"recurrence": '{"kind": "cron", "cron": "0 * * * *", "timezone": "Mars/Olympus"}'},
        {"recurrence": '{"kind": "cron", "cron": "99 * * * *", "timezone": "UTC"}'},
        {"retry": "{}"},
        {"retry": '"x"'},
        {"misfire": "perhaps"},
        {"next_fire_at": NOW + timedelta(microseconds=1)},
        {"expires_after": timedelta.max},
    ],
)
def test_what_one_schedule_raises_is_its_own_affair(columns: dict[str, Any]) -> None:
    good, bad, other = row(), row(**columns), row()
    result = drafted([good, bad, other])
    assert [draft.row for draft in result.drafts] == [good, other]
    assert list(result.poison) == [bad.id]
    assert ": " in result.poison[bad.id]
    assert result.taken == 3


def test_schedules_of_one_rule_share_their_plan_and_hashed_ones_do_not() -> None:
    plain = [row(make.HOURLY) for _ in range(3)]
    hashed = [row(Cron("H * * * *", "UTC")) for _ in range(20)]
    result = drafted([*plain, *hashed])
    assert {draft.next_fire_at for draft in result.drafts[:3]} == {NOW + timedelta(hours=1)}
    assert len({draft.next_fire_at for draft in result.drafts[3:]}) > 1
    assert len({draft.runs[0].id for draft in result.drafts}) == 23


def test_equal_rules_with_other_policies_or_pointers_are_planned_apart() -> None:
    late = NOW - timedelta(hours=3)
    rows = [
        row(at=late),
        row(at=late, misfire="skip"),
        row(at=late, expires_after=timedelta(minutes=1)),
        row(at=NOW),
    ]
    fired = [[run.scheduled_for for run in draft.runs] for draft in drafted(rows).drafts]
    assert fired == [[NOW - timedelta(hours=1), NOW], [NOW], [NOW], [NOW]]


def test_a_batch_ends_when_it_has_enough_runs() -> None:
    rows = [row(make.every(1, NOW)) for _ in range(10)]  # six runs each
    result = drafted(rows, runs_at_most=13)
    assert (result.taken, len(result.drafts)) == (3, 3)


def test_a_batch_ends_when_its_time_is_spent_but_never_before_its_first_schedule() -> None:
    rows = [row() for _ in range(10)]
    assert drafted(rows, ticks=0.3).taken == 4
    assert drafted(rows, ticks=100).taken == 1


def test_poison_spends_the_budget_too() -> None:
    rows = [row(misfire="perhaps") for _ in range(10)]
    assert drafted(rows, ticks=100).taken == 1


def test_a_schedule_that_cannot_move_is_left_out() -> None:
    assert drafted([row(at=NOW + timedelta(hours=1))]).drafts == []
