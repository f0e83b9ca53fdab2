"""From the outcome of a round to its figures: exactly once, how fast, how late, at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from app.domain.ids import MICROSECOND
from app.load.ledger import Ledger, lateness_of
from app.load.round import STEP_MS
from app.load.seeds import instant_ns
from app.load.stage import Fleet, Outcome
from app.load.summary import Figures
from app.store.load_measure import PlannedRuns

SECOND_NS = 1_000_000_000
UNCOUNTED = "the target keeps no ledger: whether each delivery came exactly once was not counted"
STEP_NS = STEP_MS * 1_000_000


def figures_of(
    scenario: str,
    outcome: Outcome,
    fleet: Fleet,
    *,
    claim_mode: str,
    tenants: int,
    own: Mapping[str, Any] | None = None,
) -> Figures:
    """What one round has shown. Rates are from the (first) instant on, by the database's clock."""
    recorded = len(outcome.succeeded & outcome.due_ns.keys())
    runs = len(outcome.due_ns)
    costs = outcome.costs
    figures = Figures(
        scenario=scenario,
        claim_mode=claim_mode,
        schedules=runs,
        tenants=tenants,
        executors=fleet.executors,
        expected=runs,
        recorded=recorded,
        planned_per_s=planned_per_s(outcome.planned, fleet.planners, seen_at=outcome.planned_seen_at),
        recorded_per_s=rate(recorded, outcome.first, outcome.ended.last_success_at),
        cpu_us_per_run=costs.cpu_us_per_run(runs),
        wal_bytes_per_run=costs.wal_bytes / runs,
        statements_per_run=costs.statements_per_run(runs),
        statements=costs.busiest_statements(runs),
        transactions_per_run=costs.transactions / runs,
        others_cpu_share=costs.others_share,
        stolen_cpu_share=costs.stolen_share,
        own=own or {},
        problems=_unsuccessful(outcome),
        series=_series(outcome),
    )
    if outcome.ledger is None:
        return replace(figures, notes=[*figures.notes, UNCOUNTED])
    return _with_deliveries(figures, outcome, outcome.ledger)


def _with_deliveries(figures: Figures, outcome: Outcome, ledger: Ledger) -> Figures:
    """What the target has seen, beside what the database has."""
    arrived = {key: at for key, at in ledger.first.items() if key in outcome.due_ns}
    late = lateness_of(arrived, outcome.due_ns, offset_ns=outcome.offset.ns)
    return replace(
        figures,
        delivered=len(arrived),
        duplicates=ledger.duplicates,
        missing=len(outcome.due_ns) - len(arrived),
        delivered_per_s=_delivered_per_s(outcome, arrived),
        lateness_ms=late.percentiles(),
        lateness_curve=late.curve(),
        own={"clock_offset_us": outcome.offset.ns / 1000, **figures.own},
        problems=[*figures.problems, *_strange(outcome, ledger, early=late.early)],
    )


def planned_per_s(planned: PlannedRuns, planners: int, *, seen_at: datetime | None) -> float | None:
    """Runs written per second from the first planner transaction on.

    The rows tell when their transactions began, so the last ones (one per planner) are put at the mean length of the
    others. Where there are no others, the end is when everything was seen to be planned: later than it was, so the
    figure is too low rather than too high.
    """
    if planned.first_at is None or planned.last_at is None:
        return None
    if planned.batches > planners:
        span = (planned.last_at - planned.first_at) * planned.batches / (planned.batches - planners)
        return planned.runs / max(span, MICROSECOND).total_seconds()
    return rate(planned.runs, planned.first_at, seen_at)


def rate(count: int, since: datetime, until: datetime | None) -> float | None:
    """Per second; None when there is no end or it is not after the begin."""
    if until is None or until - since <= timedelta():
        return None
    return count / (until - since).total_seconds()


def _delivered_per_s(outcome: Outcome, arrived: Mapping[bytes, int]) -> float | None:
    """Deliveries per second from the first instant to the last delivery's first byte."""
    if not arrived:
        return None
    span_ns = max(arrived.values()) - outcome.offset.ns - instant_ns(outcome.first)
    return len(arrived) * SECOND_NS / span_ns if span_ns > 0 else None


def _unsuccessful(outcome: Outcome) -> list[str]:
    others = {status: runs for status, runs in outcome.ended.by_status.items() if status != "succeeded"}
    told = ", ".join(f"{runs:,} {status}" for status, runs in others.items())
    return [f"runs that have not succeeded: {told}"] if told else []


def _strange(outcome: Outcome, ledger: Ledger, *, early: int) -> list[str]:
    """Requests that should not have come at all, or not yet."""
    problems: list[str] = []
    if strangers := len(ledger.first.keys() - outcome.due_ns.keys()):
        problems.append(f"{strangers:,} delivery ids came that nobody expected")
    if ledger.unidentified:
        problems.append(f"{ledger.unidentified:,} requests came without a delivery id")
    if early and _is_clearly_early(outcome, ledger):
        problems.append(f"{early:,} deliveries came before their instant")
    return problems


def _is_clearly_early(outcome: Outcome, ledger: Ledger) -> bool:
    """Earlier than the two clocks can be apart by mistake."""
    latest_offset = outcome.offset.ns - outcome.offset.error_ns
    due = outcome.due_ns
    return any(at - latest_offset < due[key] for key, at in ledger.first.items() if key in due)


def _series(outcome: Outcome) -> dict[str, Any]:
    """What `app.load.summary` says of series."""
    zero = instant_ns(outcome.first)
    due = Counter((at - zero) // STEP_NS for at in outcome.due_ns.values())
    first = {} if outcome.ledger is None else outcome.ledger.first
    delivered = Counter((at - outcome.offset.ns - zero) // STEP_NS for at in first.values())
    columns = {
        "due": due,
        "planned": outcome.planned_series,
        "delivered": delivered,
        "recorded": outcome.recorded_series,
    }
    steps = [step for column in columns.values() for step in column]
    span = range(min(steps), max(steps) + 1)
    drawn = {name: [column.get(step, 0) for step in span] for name, column in columns.items()}
    backlog: list[int] = []
    open_now = 0
    for came, ended in zip(drawn["due"], drawn["recorded"], strict=True):
        open_now += came - ended
        backlog.append(open_now)
    return {"step_ms": STEP_MS, "begin_ms": span.start * STEP_MS, **drawn, "backlog": backlog}
