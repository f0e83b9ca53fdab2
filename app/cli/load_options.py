"""The options that the load commands share, and what they mean for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.errors import ConfigError

if TYPE_CHECKING:
    from app.load.place import Wanted
    from app.load.verdict import Bound
    from app.settings import ClaimMode

BOTH = "both"

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where summary.json and report.html go.")]
Schedules = Annotated[int, typer.Option("--schedules", min=1, help="How many schedules.")]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="How many tenants they belong to.")]
Executors = Annotated[int, typer.Option("--executors", min=1, max=64, help="Executor processes.")]
Planners = Annotated[int, typer.Option("--planners", min=1, max=16, help="Planner processes.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, max=100, help="Repetitions; medians are told.")]
Mode = Annotated[str, typer.Option("--claim-mode", metavar="MODE", help="postgres or kafka.")]
ModeOrBoth = Annotated[
    str,
    typer.Option("--claim-mode", metavar="MODE", help="postgres, kafka, or both in turns, side by side."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="A database for load runs alone; else a PostgreSQL is started."),
]
Kafka = Annotated[
    str | None, typer.Option(metavar="B", help="Brokers; else one is started where it is needed.")
]
TargetUrl = Annotated[
    str | None,
    typer.Option("--target", metavar="URL", help="A receiver that is there already; else one is started."),
]
Owned = Annotated[
    bool, typer.Option("--i-own-this-target", help="--target may be another machine: it is yours.")
]
WorkDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder on a disk for the started PostgreSQL's data.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A SCHEDULER_* setting of every replica; repeatable."),
]
ServerSet = Annotated[
    list[str] | None,
    typer.Option(
        "--server-set", metavar="NAME=VALUE", help="A setting of the started PostgreSQL; repeatable."
    ),
]

Limit = float | None
MaxP99 = Annotated[Limit, typer.Option("--max-p99-ms", help="Bound of the 99th percentile of lateness.")]
MaxLateness = Annotated[Limit, typer.Option("--max-lateness-ms", help="Bound of the largest lateness.")]
MinRecorded = Annotated[Limit, typer.Option("--min-recorded-per-s", help="Bound of recorded_per_s.")]
MinPlanned = Annotated[Limit, typer.Option("--min-planned-per-s", help="Bound of planned_per_s.")]
MinSettled = Annotated[Limit, typer.Option("--min-claim-settle-per-s", help="Bound of claim_settle_per_s.")]
MaxCpu = Annotated[Limit, typer.Option("--max-cpu-us-per-run", help="Bound of all CPU time per run.")]
MaxWal = Annotated[Limit, typer.Option("--max-wal-bytes-per-run", help="Bound of the log per run.")]
MaxStatements = Annotated[
    Limit, typer.Option("--max-statements-per-run", help="Bound of statements per run.")
]
MaxIdle = Annotated[Limit, typer.Option("--max-idle-cpu-percent", help="Bound of idling, of one core.")]
MaxQuiet = Annotated[Limit, typer.Option("--max-quiet-p99-ms", help="Bound of the quiet tenants' p99.")]
MaxQuietRatio = Annotated[
    Limit, typer.Option("--max-quiet-ratio", help="Bound of their p99 against that without the burst.")
]
MaxClaimRatio = Annotated[
    Limit, typer.Option("--max-claim-p99-ratio", help="Bound of the claims' p99 against that before.")
]
MaxMemory = Annotated[
    Limit, typer.Option("--max-memory-bytes-per-run", help="Bound of memory per run in flight.")
]
MinRatio = Annotated[Limit, typer.Option("--min-ratio", help="Bound of the rate against that without.")]
MaxPage = Annotated[Limit, typer.Option("--max-page-p99-ms", help="Bound of a page's p99.")]
MaxRun = Annotated[Limit, typer.Option("--max-run-p99-ms", help="Bound of a single run's p99.")]

BOUNDED: Mapping[str, tuple[str, ...]] = {
    "max_p99_ms": ("lateness_ms", "p99"),
    "max_lateness_ms": ("lateness_ms", "max"),
    "min_recorded_per_s": ("recorded_per_s",),
    "min_planned_per_s": ("planned_per_s",),
    "min_claim_settle_per_s": ("claim_settle_per_s",),
    "max_cpu_us_per_run": ("cpu_us_per_run", "total"),
    "max_wal_bytes_per_run": ("wal_bytes_per_run",),
    "max_statements_per_run": ("statements_per_run",),
    "max_idle_cpu_percent": ("idle_cpu_percent",),
    "max_quiet_p99_ms": ("quiet", "burst_p99_ms"),
    "max_quiet_ratio": ("quiet", "ratio"),
    "max_claim_p99_ratio": ("claim_p99_ratio",),
    "max_memory_bytes_per_run": ("memory_bytes_per_run_in_flight",),
    "min_ratio": ("ratio",),
    "max_page_p99_ms": ("page_p99_ms",),
    "max_run_p99_ms": ("run_p99_ms",),
}
"""The figure that each bound is about."""


def bounds_of(**limits: float | None) -> list[Bound]:
    """The bounds that were given, by the names of their options."""
    from app.load.verdict import Bound

    return [
        Bound(f"--{name.replace('_', '-')}", BOUNDED[name], limit)
        for name, limit in limits.items()
        if limit is not None
    ]


def modes_of(claim_mode: str, *, may_be_both: bool = False) -> list[ClaimMode]:
    """Raises ConfigError for a word that is no mode."""
    from app.settings import ClaimMode

    if may_be_both and claim_mode == BOTH:
        return list(ClaimMode)
    if claim_mode not in set(ClaimMode):
        allowed = ", ".join([*ClaimMode, *([BOTH] if may_be_both else [])])
        raise ConfigError(f"--claim-mode: there is no such mode. Allowed: {allowed}")
    return [ClaimMode(claim_mode)]


def wanted_of(
    modes: Sequence[ClaimMode],
    *,
    database_url: str | None,
    kafka_bootstrap: str | None = None,
    target: str | None = None,
    is_target_owned: bool = False,
    work_dir: Path | None,
    settings: list[str] | None,
    server_settings: list[str] | None,
) -> Wanted:
    """The servers and settings of a run; of several modes it is kafka's servers that serve all.

    Raises ConfigError for words that cannot be read and for a target that nobody says is theirs.
    """
    from app.load.place import Wanted
    from app.load.refusals import require_owned
    from app.settings import ClaimMode

    if target is not None:
        require_owned(target, is_owned=is_target_owned)
    return Wanted(
        claim_mode=ClaimMode.KAFKA if ClaimMode.KAFKA in modes else modes[0],
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        target_url=target,
        work_dir=work_dir,
        settings={_variable(name): value for name, value in _pairs("--set", settings).items()},
        server_settings=_pairs("--server-set", server_settings),
    )


def _variable(name: str) -> str:
    upper = name.upper()
    return upper if upper.startswith("SCHEDULER_") else f"SCHEDULER_{upper}"


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option}: {text!r} is not of the form NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs
