"""What each figure of a summary is called, how it is written, and what it means."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.load.report_numbers import count, microseconds, milliseconds, plain, size_of


@dataclass(frozen=True, slots=True)
class Word:
    """`write` makes text of the number; `meaning` is one sentence, or part of one."""

    label: str
    write: Callable[[float], str]
    meaning: str = ""


def per_second(value: float) -> str:
    """A rate."""
    return f"{plain(value)}/s"


def percent(value: float) -> str:
    """A value that is in percent already."""
    return f"{plain(value)} %"


def share_of_core(value: float) -> str:
    """A share of one core."""
    return f"{plain(value * 100)} % of a core"


def times(value: float) -> str:
    """A ratio."""
    return f"{plain(value)} ×"


RATES: Mapping[str, Word] = {
    "recorded_per_s": Word(
        "recorded", per_second, "runs until the last settlement's commit, from the instant on"
    ),
    "delivered_per_s": Word(
        "delivered", per_second, "first bytes at the target until the last, from the instant on"
    ),
    "planned_per_s": Word("planned", per_second, "runs written and schedules advanced by the planner"),
    "claim_settle_per_s": Word("claimed and settled", per_second, "with attempt rows, without HTTP"),
}

COSTS: Mapping[str, Word] = {
    "wal_bytes_per_run": Word("log written per run", size_of, "PostgreSQL's write-ahead log"),
    "statements_per_run": Word("statements per run", plain, "of all of Carillon"),
    "transactions_per_run": Word("transactions per run", plain),
    "others_cpu_share": Word(
        "taken by others", share_of_core, "by everything else on the machine: noise in every figure"
    ),
    "stolen_cpu_share": Word("taken by the host", share_of_core, "for other guests of the same hardware"),
}

CPU_PARTS: Mapping[str, str] = {
    "executor": "executors",
    "planner": "planner",
    "postgres": "PostgreSQL",
    "receiver": "target",
    "broker": "broker",
}

ONCE: Mapping[str, Word] = {
    "expected": Word("expected", count, "runs that had to happen"),
    "delivered": Word("delivered", count, "different delivery ids that reached the target"),
    "recorded": Word("recorded", count, "runs that the database has as succeeded"),
    "duplicates": Word("duplicate", count, "requests beyond the first of a delivery id"),
    "missing": Word("missing", count, "delivery ids that never reached the target"),
}

LATENESS: Mapping[str, Word] = {
    "p50": Word("half", milliseconds, "p50"),
    "p90": Word("90 %", milliseconds, "p90"),
    "p99": Word("99 %", milliseconds, "p99"),
    "p999": Word("99.9 %", milliseconds, "p99.9"),
    "max": Word("the last one", milliseconds, "maximum"),
}

OWN: Mapping[str, Word] = {
    "idle_schedules": Word("schedules that are not due", count),
    "idle_cpu_percent": Word(
        "CPU while nothing is due", percent, "of one core, Carillon and PostgreSQL together"
    ),
    "idle_seconds": Word("idle time measured", lambda value: f"{plain(value)} s"),
    "idle_wal_bytes_per_s": Word("log written while idle", lambda value: f"{size_of(value)}/s"),
    "busy_cpu_percent": Word("CPU under load", percent, "of one core"),
    "rate": Word("rate asked for", per_second),
    "seconds": Word("for", lambda value: f"{plain(value)} s"),
    "quiet.solo_p99_ms": Word("quiet tenants' p99 alone", milliseconds),
    "quiet.burst_p99_ms": Word("quiet tenants' p99 during the burst", milliseconds, "of another tenant"),
    "quiet.ratio": Word("burst over solo", times),
    "quiet.runs_during_burst": Word("quiet runs during the burst", count),
    "quiet.tenants": Word("quiet tenants", count),
    "ratio": Word("with a held snapshot, over without", times, "throughput"),
    "ratio_of_last": Word("the last round, over without", times),
    "held_seconds": Word("snapshot held for", lambda value: f"{plain(value)} s"),
    "page_p99_ms": Word("a page of the history, p99", milliseconds, "over HTTP"),
    "run_p99_ms": Word("one run by its id, p99", milliseconds, "over HTTP"),
    "rows": Word("runs in the history", count),
    "memory_bytes_per_run_in_flight": Word("memory per run in flight", size_of),
    "most_in_flight": Word("most in flight", count),
    "slow_targets": Word("slow targets", count),
    "claim_ms.before": Word("a claim, before the slow targets", milliseconds),
    "claim_ms.during": Word("a claim, with all of them in flight", milliseconds),
    "claim_p99_ratio": Word("a claim's p99, during over before", times),
    "quick.before_p99_ms": Word("late at quick targets, p99, before", milliseconds),
    "quick.during_p99_ms": Word("late at quick targets, p99, during", milliseconds),
    "noisy_lateness_ms": Word("the bursting tenant's lateness", milliseconds),
    "delay_seconds": Word("they answer after", lambda value: f"{plain(value)} s"),
    "page_ms": Word("a page of the history", milliseconds, "over HTTP"),
    "schedule_page_ms": Word("a page of one schedule's history", milliseconds, "over HTTP"),
    "run_ms": Word("one run by its id", milliseconds, "over HTTP"),
    "free_recorded_per_s": Word("recorded without a snapshot", per_second, "each round"),
    "held_recorded_per_s": Word("recorded while it is held", per_second, "each round"),
    "clock_offset_us": Word(
        "target's clock minus the database's", microseconds, "measured, and taken out of lateness"
    ),
}

UNIT = re.compile(r"_(?:ms|us|seconds|percent)(?=$|[._])")
"""A unit within a key: it is told with the number."""

ENDINGS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("bytes_per_s", lambda value: f"{size_of(value)}/s"),
    ("bytes_per_run", size_of),
    ("_ms", milliseconds),
    ("_us", microseconds),
    ("_per_s", per_second),
    ("_percent", percent),
    ("_seconds", lambda value: f"{plain(value)} s"),
    ("_ratio", times),
)


def word_for(key: str) -> Word:
    """The word for a scenario's own key; one that is not known is told as it stands, its unit by its ending."""
    if key in OWN:
        return OWN[key]
    label, parts = UNIT.sub("", key).replace("_", " ").replace(".", ", "), key.split(".")
    for ending, write in ENDINGS:
        if any(part.endswith(ending) for part in parts):
            return Word(label, write)
    return Word(label, size_of if "bytes" in key else plain)
