"""Admission: may this claimed run be sent, or how does it end unsent? Judged at fire time, under its lease."""

from __future__ import annotations

from app.domain.run import Cancel, ClaimedRun, Fail, Origin, Reason, Settlement


def admit(run: ClaimedRun) -> Settlement | None:
    """None: send it. Otherwise the settlement, with its reason, that ends the run at once.

    A person's own "run now" is sent from a paused schedule too; nothing is sent from a deleted one.
    """
    if run.is_cancel_requested:
        return Cancel(Reason.CANCELLED)
    if run.is_exhausted:
        return Fail(Reason.ATTEMPTS_SPENT)
    if run.is_expired:
        return Fail(Reason.EXPIRED)
    if run.schedule_status in (None, "deleted"):
        return Cancel(Reason.SCHEDULE_DELETED)
    if run.schedule_status in _STOPPED and run.origin is Origin.SCHEDULE:
        return Cancel(_STOPPED[run.schedule_status])
    return None


_STOPPED = {"paused": Reason.SCHEDULE_PAUSED, "error": Reason.SCHEDULE_QUARANTINED}
