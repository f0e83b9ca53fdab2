from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from app.domain.ids import ScheduleId, TenantId
from app.domain.recurrence import Cron, Once
from app.domain.retry import RetryPolicy
from app.domain.schedule import (
    Misfire,
    Overlap,
    Schedule,
    ScheduleChange,
    ScheduleStatus,
    changed,
    new_schedule,
)
from app.domain.target import Target
from app.errors import InvalidInput

NOW = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)
TARGET = Target("POST", "https://example.com/", (), None)


def made(**fields: object) -> Schedule:
    given: dict[str, object] = {
        "name": "n",
        "recurrence": Cron("0 * * * *", "UTC"),
        "target": TARGET,
        "now": NOW,
    }
    return new_schedule(ScheduleId(uuid4()), TenantId(uuid4()), **(given | fields))  # type: ignore[arg-type]


def test_a_new_schedule_fires_first_strictly_after_now() -> None:
    at_the_hour = datetime(2026, 5, 1, 13, tzinfo=UTC)
    assert made().next_fire_at == at_the_hour
    assert made(now=at_the_hour).next_fire_at == at_the_hour + timedelta(hours=1)


def test_a_new_schedule_has_the_defaults_that_the_docs_name() -> None:
    one = made()
    assert (one.status, one.version, one.misfire, one.overlap) == (
        ScheduleStatus.ACTIVE,
        1,
        Misfire.FIRE_ONCE,
        Overlap.ALLOW,
    )
    assert (one.expires_after, one.retry) == (timedelta(days=1), RetryPolicy())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": " \t"}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"expires_after": timedelta(0)}, "expires_after_seconds"),
        ({"expires_after": timedelta(seconds=-1)}, "expires_after_seconds"),
        ({"expires_after": timedelta(days=30, microseconds=1)}, "expires_after_seconds"),
        ({"expires_after": timedelta.max}, "expires_after_seconds"),
        ({"recurrence": Once(NOW)}, "recurrence.at"),
        ({"recurrence": Cron("0 0 31 4 *", "UTC")}, "recurrence.cron"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_its_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        made(**fields)
    assert refused.value.field == field


def test_an_edit_that_says_what_is_already_so_changes_nothing() -> None:
    one = made()
    same = ScheduleChange(
        name=one.name,
        recurrence=Cron("0 * * * *", "UTC"),
        target=Target("POST", "https://example.com/", (), None),
        retry=RetryPolicy(),
        misfire=Misfire.FIRE_ONCE,
        overlap=Overlap.ALLOW,
        expires_after=timedelta(days=1),
    )
    assert changed(one, same) == one
    assert changed(one, ScheduleChange()) == one


def test_an_edit_changes_what_it_names_and_nothing_else() -> None:
    one = made()
    assert changed(one, ScheduleChange(misfire=Misfire.SKIP)) == replace(one, misfire=Misfire.SKIP)
    assert changed(one, ScheduleChange(name="other")) == replace(one, name="other")
    assert changed(one, ScheduleChange(expires_after=timedelta(seconds=1))) == replace(
        one, expires_after=timedelta(seconds=1)
    )


def test_an_edit_is_checked_like_a_new_schedule() -> None:
    with pytest.raises(InvalidInput, match="name"):
        changed(made(), ScheduleChange(name=""))
    with pytest.raises(InvalidInput, match="expires_after_seconds"):
        changed(made(), ScheduleChange(expires_after=timedelta(0)))
