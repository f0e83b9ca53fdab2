"""`carillon load …`: what Carillon reaches on this machine. Every command writes DIR/summary.json and DIR/report.html.

Exit status: 0 good, 1 something was lost, doubled or outside a bound, 2 the command line is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.errors import ConfigError

if TYPE_CHECKING:
    from app.load.place import Wanted
    from app.load.run import Scenario
    from app.load.verdict import Bound

app = typer.Typer(
    help="Measure what Carillon reaches: speed, lateness, cost, exactly once.", no_args_is_help=True
)

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where summary.json and report.html go.")]
Mode = Annotated[str, typer.Option("--claim-mode", metavar="MODE", help="postgres or kafka.")]
Schedules = Annotated[int, typer.Option("--schedules", min=1, help="How many schedules.")]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="How many tenants they belong to.")]
Executors = Annotated[int, typer.Option("--executors", min=1, max=64, help="Executor processes.")]
Planners = Annotated[int, typer.Option("--planners", min=1, max=16, help="Planner processes.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, max=100, help="Repetitions; medians are told.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database-url", metavar="URL", help="An empty database; else a PostgreSQL is started."),
]
Kafka = Annotated[
    str | None,
    typer.Option("--kafka-bootstrap", metavar="B", help="Brokers; else one is started in kafka mode."),
]
TargetUrl = Annotated[
    str | None,
    typer.Option("--target", metavar="URL", help="A receiver that is there already; else one is started."),
]
Owned = Annotated[
    bool, typer.Option("--i-own-this-target", help="--target may be another machine: it is yours.")
]
WorkDir = Annotated[
    Path | None,
    typer.Option("--work-dir", metavar="DIR", help="Folder on a disk for the started PostgreSQL's data."),
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
MaxP99 = Annotated[float | None, typer.Option("--max-p99-ms", help="Bound of the lateness' p99.")]
MaxLateness = Annotated[
    float | None, typer.Option("--max-lateness-ms", help="Bound of the largest lateness.")
]
MinRecorded = Annotated[float | None, typer.Option("--min-recorded-per-s", help="Bound of recorded_per_s.")]
MinPlanned = Annotated[float | None, typer.Option("--min-planned-per-s", help="Bound of planned_per_s.")]
MinSettled = Annotated[
    float | None, typer.Option("--min-claim-settle-per-s", help="Bound of claim_settle_per_s.")
]
MaxCpu = Annotated[float | None, typer.Option("--max-cpu-us-per-run", help="Bound of all CPU time per run.")]
MaxWal = Annotated[float | None, typer.Option("--max-wal-bytes-per-run", help="Bound of the log per run.")]
MaxStatements = Annotated[
    float | None, typer.Option("--max-statements-per-run", help="Bound of statements per run.")
]

BOUNDS: Mapping[str, tuple[str, ...]] = {
    "--max-p99-ms": ("lateness_ms", "p99"),
    "--max-lateness-ms": ("lateness_ms", "max"),
    "--min-recorded-per-s": ("recorded_per_s",),
    "--min-planned-per-s": ("planned_per_s",),
    "--min-claim-settle-per-s": ("claim_settle_per_s",),
    "--max-cpu-us-per-run": ("cpu_us_per_run", "total"),
    "--max-wal-bytes-per-run": ("wal_bytes_per_run",),
    "--max-statements-per-run": ("statements_per_run",),
}


@app.callback()
def load() -> None:
    """Measure what Carillon reaches: speed, lateness, cost, exactly once."""


@app.command()
def burst(
    out: Out,
    schedules: Schedules = 100_000,
    tenants: Tenants = 1_000,
    claim_mode: Mode = "postgres",
    executors: Executors = 2,
    planners: Planners = 1,
    repeat: Repeat = 1,
    database_url: DatabaseUrl = None,
    kafka_bootstrap: Kafka = None,
    target: TargetUrl = None,
    i_own_this_target: Owned = False,
    work_dir: WorkDir = None,
    settings: Set = None,
    server_settings: ServerSet = None,
    max_p99_ms: MaxP99 = None,
    max_lateness_ms: MaxLateness = None,
    min_recorded_per_s: MinRecorded = None,
    min_planned_per_s: MinPlanned = None,
    max_cpu_us_per_run: MaxCpu = None,
    max_wal_bytes_per_run: MaxWal = None,
    max_statements_per_run: MaxStatements = None,
) -> None:
    """All schedules due at one instant: planned by the real planner, delivered over HTTP, recorded."""
    from app.load.scenarios.burst import Burst, measure

    wanted = _wanted(claim_mode, database_url, kafka_bootstrap, work_dir, settings, server_settings)
    wanted = _aimed(wanted, target, is_owned=i_own_this_target)
    one = Burst(schedules, min(tenants, schedules), executors, planners)
    bounds = _bounds(
        {
            "--max-p99-ms": max_p99_ms,
            "--max-lateness-ms": max_lateness_ms,
            "--min-recorded-per-s": min_recorded_per_s,
            "--min-planned-per-s": min_planned_per_s,
            "--max-cpu-us-per-run": max_cpu_us_per_run,
            "--max-wal-bytes-per-run": max_wal_bytes_per_run,
            "--max-statements-per-run": max_statements_per_run,
        }
    )
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, repeat, bounds)


@app.command()
def planner(
    out: Out,
    schedules: Schedules = 100_000,
    tenants: Tenants = 1_000,
    claim_mode: Mode = "postgres",
    planners: Planners = 1,
    repeat: Repeat = 1,
    database_url: DatabaseUrl = None,
    kafka_bootstrap: Kafka = None,
    work_dir: WorkDir = None,
    settings: Set = None,
    server_settings: ServerSet = None,
    min_planned_per_s: MinPlanned = None,
    max_wal_bytes_per_run: MaxWal = None,
) -> None:
    """Hourly schedules, all due now: runs written and schedules advanced per second. Nobody claims them."""
    from app.load.scenarios.planner import Planning, measure

    wanted = _wanted(claim_mode, database_url, kafka_bootstrap, work_dir, settings, server_settings)
    one = Planning(schedules, min(tenants, schedules), planners)
    bounds = _bounds(
        {"--min-planned-per-s": min_planned_per_s, "--max-wal-bytes-per-run": max_wal_bytes_per_run}
    )
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, repeat, bounds)


@app.command()
def claims(
    out: Out,
    runs: Annotated[int, typer.Option("--runs", min=1, help="How many due runs.")] = 100_000,
    tenants: Tenants = 1_000,
    executors: Executors = 2,
    repeat: Repeat = 1,
    database_url: DatabaseUrl = None,
    work_dir: WorkDir = None,
    settings: Set = None,
    server_settings: ServerSet = None,
    min_claim_settle_per_s: MinSettled = None,
    max_cpu_us_per_run: MaxCpu = None,
    max_wal_bytes_per_run: MaxWal = None,
) -> None:
    """Due runs, claimed and settled with their attempt rows, without any HTTP."""
    from app.load.scenarios.claims import Claims, measure

    wanted = _wanted("postgres", database_url, None, work_dir, settings, server_settings)
    one = Claims(runs, min(tenants, runs), executors)
    bounds = _bounds(
        {
            "--min-claim-settle-per-s": min_claim_settle_per_s,
            "--max-cpu-us-per-run": max_cpu_us_per_run,
            "--max-wal-bytes-per-run": max_wal_bytes_per_run,
        }
    )
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, repeat, bounds)


def _wanted(
    claim_mode: str,
    database_url: str | None,
    kafka_bootstrap: str | None,
    work_dir: Path | None,
    settings: list[str] | None,
    server_settings: list[str] | None,
) -> Wanted:
    """Raises ConfigError for words that cannot be read."""
    from app.load.place import Wanted
    from app.settings import ClaimMode

    if claim_mode not in set(ClaimMode):
        raise ConfigError(f"--claim-mode: there is no such mode. Allowed: {', '.join(ClaimMode)}")
    return Wanted(
        claim_mode=ClaimMode(claim_mode),
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        work_dir=work_dir,
        settings={
            name.upper() if name.upper().startswith("SCHEDULER_") else f"SCHEDULER_{name.upper()}": value
            for name, value in _pairs("--set", settings).items()
        },
        server_settings=_pairs("--server-set", server_settings),
    )


def _aimed(wanted: Wanted, target: str | None, *, is_owned: bool) -> Wanted:
    """Raises ConfigError for a target that nobody says is theirs."""
    from app.load.refusals import require_owned

    if target is None:
        return wanted
    require_owned(target, is_owned=is_owned)
    return replace(wanted, target_url=target)


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}: {text!r} is not of the form NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _bounds(given: Mapping[str, float | None]) -> list[Bound]:
    from app.load.verdict import Bound

    return [Bound(option, BOUNDS[option], limit) for option, limit in given.items() if limit is not None]


def _carry_out(scenario: Scenario, wanted: Wanted, out: Path, repeat: int, bounds: list[Bound]) -> None:
    from app.load.progress import Show
    from app.load.run import Order, carry_out

    order = Order(scenario, wanted, out, repeat, bounds, tuple(sys.argv[1:]))
    raise typer.Exit(carry_out(order, Show()))
