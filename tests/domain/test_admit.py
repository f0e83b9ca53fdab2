from __future__ import annotations

from dataclasses import replace
from itertools import product
from uuid import UUID

import pytest

from app.domain.admit import admit
from app.domain.ids import EPOCH, DeliveryId, RunId, ScheduleId, TenantId
from app.domain.run import Cancel, ClaimedRun, Fail, Lease, Origin, Reason, RunRef, Settlement

NIL = UUID(int=0)
SOUND = ClaimedRun(
    lease=Lease(RunRef(RunId(NIL), TenantId(NIL), EPOCH, EPOCH), "a/b/1", 1),
    schedule_id=ScheduleId(NIL),
    schedule_version=1,
    schedule_status="active",
    origin=Origin.SCHEDULE,
    delivery_id=DeliveryId(NIL),
    max_attempts=5,
    granted_at=EPOCH,
    asked_at=0.0,
    answered_at=0.0,
    is_exhausted=False,
    is_expired=False,
    is_cancel_requested=False,
)


def test_a_sound_run_is_sent() -> None:
    assert admit(SOUND) is None


@pytest.mark.parametrize(
    ("status", "from_schedule", "by_hand"),
    [
        ("active", None, None),
        ("finished", None, None),
        ("paused", Cancel(Reason.SCHEDULE_PAUSED), None),
        ("error", Cancel(Reason.SCHEDULE_QUARANTINED), None),
        ("deleted", Cancel(Reason.SCHEDULE_DELETED), Cancel(Reason.SCHEDULE_DELETED)),
        (None, Cancel(Reason.SCHEDULE_DELETED), Cancel(Reason.SCHEDULE_DELETED)),
    ],
)
def test_the_state_of_the_schedule_at_fire_time_decides_and_a_persons_own_run_only_needs_it_to_exist(
    status: str | None, from_schedule: Settlement | None, by_hand: Settlement | None
) -> None:
    run = replace(SOUND, schedule_status=status)
    assert admit(run) == from_schedule
    assert admit(replace(run, origin=Origin.MANUAL)) == by_hand
    assert admit(replace(run, origin=Origin.REPLAY)) == by_hand


def test_a_cancel_request_comes_before_spent_attempts_before_expiry_before_the_schedule() -> None:
    for cancelled, exhausted, expired, status in product(
        [True, False], [True, False], [True, False], ["active", "paused", None]
    ):
        run = replace(
            SOUND,
            is_cancel_requested=cancelled,
            is_exhausted=exhausted,
            is_expired=expired,
            schedule_status=status,
        )
        verdict = admit(run)
        if cancelled:
            assert verdict == Cancel(Reason.CANCELLED)
        elif exhausted:
            assert verdict == Fail(Reason.ATTEMPTS_SPENT)
        elif expired:
            assert verdict == Fail(Reason.EXPIRED)
        else:
            assert (verdict is None) == (status == "active")
