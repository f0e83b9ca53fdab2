"""`carillon load …`: what Carillon reaches on this machine. Every command writes DIR/summary.json and DIR/report.html.

Exit status: 0 good, 1 something was lost, doubled or outside a bound, 2 the command line is wrong.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import load_options as of
from app.cli.load_options import bounds_of, modes_of, wanted_of
from app.errors import ConfigError

if TYPE_CHECKING:
    from app.load.place import Wanted
    from app.load.run import Scenario
    from app.load.verdict import Bound
    from app.settings import ClaimMode

app = typer.Typer(
    help="Measure what Carillon reaches: speed, lateness, cost, exactly once.", no_args_is_help=True
)


@app.callback()
def load() -> None:
    """Measure what Carillon reaches: speed, lateness, cost, exactly once."""


@app.command()
def burst(
    out: of.Out,
    schedules: of.Schedules = 100_000,
    tenants: of.Tenants = 1_000,
    claim_mode: of.ModeOrBoth = "postgres",
    executors: of.Executors = 2,
    planners: of.Planners = 1,
    repeat: of.Repeat = 1,
    database_url: of.DatabaseUrl = None,
    kafka_bootstrap: of.Kafka = None,
    target: of.TargetUrl = None,
    i_own_this_target: of.Owned = False,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    max_p99_ms: of.MaxP99 = None,
    max_lateness_ms: of.MaxLateness = None,
    min_recorded_per_s: of.MinRecorded = None,
    min_planned_per_s: of.MinPlanned = None,
    max_cpu_us_per_run: of.MaxCpu = None,
    max_wal_bytes_per_run: of.MaxWal = None,
    max_statements_per_run: of.MaxStatements = None,
) -> None:
    """All schedules due at one instant: planned by the real planner, delivered over HTTP, recorded."""
    modes = modes_of(claim_mode, may_be_both=True)
    wanted = wanted_of(
        modes,
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        target=target,
        is_target_owned=i_own_this_target,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(
        max_p99_ms=max_p99_ms,
        max_lateness_ms=max_lateness_ms,
        min_recorded_per_s=min_recorded_per_s,
        min_planned_per_s=min_planned_per_s,
        max_cpu_us_per_run=max_cpu_us_per_run,
        max_wal_bytes_per_run=max_wal_bytes_per_run,
        max_statements_per_run=max_statements_per_run,
    )
    from app.load.scenarios.burst import Burst, measure

    one = Burst(schedules, min(tenants, schedules), executors, planners)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds, repeat=repeat, modes=modes)


@app.command()
def steady(
    out: of.Out,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Schedules a second.")] = 500,
    seconds: Annotated[int, typer.Option("--seconds", min=1, help="For so long.")] = 60,
    idle_schedules: Annotated[
        int, typer.Option("--idle-schedules", min=0, help="Others, that are not due for days.")
    ] = 0,
    idle_seconds: Annotated[
        int, typer.Option("--idle-seconds", min=0, help="Measure idling for so long first.")
    ] = 30,
    tenants: of.Tenants = 1_000,
    claim_mode: of.Mode = "postgres",
    executors: of.Executors = 2,
    planners: of.Planners = 1,
    repeat: of.Repeat = 1,
    database_url: of.DatabaseUrl = None,
    kafka_bootstrap: of.Kafka = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    max_p99_ms: of.MaxP99 = None,
    max_lateness_ms: of.MaxLateness = None,
    max_idle_cpu_percent: of.MaxIdle = None,
) -> None:
    """So many schedules a second, beside millions that idle: lateness, and what idling costs."""
    wanted = wanted_of(
        modes_of(claim_mode),
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(
        max_p99_ms=max_p99_ms, max_lateness_ms=max_lateness_ms, max_idle_cpu_percent=max_idle_cpu_percent
    )
    from app.load.scenarios.steady import Steady, measure

    one = Steady(rate, seconds, idle_schedules, idle_seconds, tenants, executors, planners)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds, repeat=repeat)


@app.command()
def fairness(
    out: of.Out,
    tenants: Annotated[int, typer.Option("--tenants", min=1, help="Quiet tenants.")] = 1_000,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Their schedules a second, all together.")] = 100,
    seconds: Annotated[int, typer.Option("--seconds", min=5, help="For so long.")] = 30,
    burst: Annotated[int, typer.Option("--burst", min=1, help="Another tenant's, at one instant.")] = 50_000,
    claim_mode: of.Mode = "postgres",
    executors: of.Executors = 2,
    planners: of.Planners = 1,
    repeat: of.Repeat = 1,
    database_url: of.DatabaseUrl = None,
    kafka_bootstrap: of.Kafka = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    max_quiet_p99_ms: of.MaxQuiet = None,
    max_quiet_ratio: of.MaxQuietRatio = None,
) -> None:
    """What many quiet tenants notice of one tenant's burst, against what they see without it."""
    wanted = wanted_of(
        modes_of(claim_mode),
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(max_quiet_p99_ms=max_quiet_p99_ms, max_quiet_ratio=max_quiet_ratio)
    from app.load.scenarios.fairness import Fairness, measure

    one = Fairness(tenants, rate, seconds, burst, executors, planners)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds, repeat=repeat)


@app.command()
def planner(
    out: of.Out,
    schedules: of.Schedules = 100_000,
    tenants: of.Tenants = 1_000,
    planners: of.Planners = 1,
    repeat: of.Repeat = 1,
    database_url: of.DatabaseUrl = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    min_planned_per_s: of.MinPlanned = None,
    max_wal_bytes_per_run: of.MaxWal = None,
) -> None:
    """Hourly schedules, all due now: runs written and schedules advanced per second. Nobody claims them."""
    wanted = wanted_of(
        modes_of("postgres"),
        database_url=database_url,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(min_planned_per_s=min_planned_per_s, max_wal_bytes_per_run=max_wal_bytes_per_run)
    from app.load.scenarios.planner import Planning, measure

    one = Planning(schedules, min(tenants, schedules), planners)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds, repeat=repeat)


@app.command()
def claims(
    out: of.Out,
    runs: Annotated[int, typer.Option("--runs", min=1, help="How many due runs.")] = 100_000,
    tenants: of.Tenants = 1_000,
    executors: of.Executors = 2,
    repeat: of.Repeat = 1,
    database_url: of.DatabaseUrl = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    min_claim_settle_per_s: of.MinSettled = None,
    max_cpu_us_per_run: of.MaxCpu = None,
    max_wal_bytes_per_run: of.MaxWal = None,
) -> None:
    """Due runs, claimed and settled with their attempt rows, without any HTTP."""
    wanted = wanted_of(
        modes_of("postgres"),
        database_url=database_url,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(
        min_claim_settle_per_s=min_claim_settle_per_s,
        max_cpu_us_per_run=max_cpu_us_per_run,
        max_wal_bytes_per_run=max_wal_bytes_per_run,
    )
    from app.load.scenarios.claims import Claims, measure

    one = Claims(runs, min(tenants, runs), executors)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds, repeat=repeat)


@app.command()
def slow(
    out: of.Out,
    targets: Annotated[int, typer.Option("--targets", min=1, help="Deliveries in flight at once.")] = 10_000,
    delay_seconds: Annotated[
        float, typer.Option("--delay-seconds", min=0.1, help="How long each target takes to answer.")
    ] = 20,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Quick schedules a second beside them.")] = 50,
    tenants: of.Tenants = 1_000,
    claim_mode: of.Mode = "postgres",
    executors: of.Executors = 2,
    database_url: of.DatabaseUrl = None,
    kafka_bootstrap: of.Kafka = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    max_claim_p99_ratio: of.MaxClaimRatio = None,
    max_memory_bytes_per_run: of.MaxMemory = None,
) -> None:
    """Thousands of targets that take seconds: what claims, quick deliveries and memory notice of them."""
    wanted = wanted_of(
        modes_of(claim_mode),
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(
        max_claim_p99_ratio=max_claim_p99_ratio, max_memory_bytes_per_run=max_memory_bytes_per_run
    )
    from app.load.scenarios.slow import Slow, measure

    one = Slow(targets, timedelta(seconds=delay_seconds), rate, tenants, executors)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds)


@app.command()
def horizon(
    out: of.Out,
    schedules: of.Schedules = 50_000,
    tenants: of.Tenants = 1_000,
    free: Annotated[int, typer.Option("--free", min=1, help="Bursts without the snapshot, before.")] = 3,
    held_seconds: Annotated[
        int, typer.Option("--held-seconds", min=1, help="Hold it for so long, burst after burst.")
    ] = 600,
    claim_mode: of.Mode = "postgres",
    executors: of.Executors = 2,
    planners: of.Planners = 1,
    database_url: of.DatabaseUrl = None,
    kafka_bootstrap: of.Kafka = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    min_ratio: of.MinRatio = None,
) -> None:
    """Bursts while another session holds a REPEATABLE READ snapshot, against bursts without."""
    wanted = wanted_of(
        modes_of(claim_mode),
        database_url=database_url,
        kafka_bootstrap=kafka_bootstrap,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    from app.load.scenarios.burst import Burst
    from app.load.scenarios.horizon import Horizon, measure

    one = Horizon(Burst(schedules, min(tenants, schedules), executors, planners), free, held_seconds)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds_of(min_ratio=min_ratio))


@app.command()
def history(
    out: of.Out,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Runs in the history.")] = 1_000_000,
    tenants: of.Tenants = 1_000,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Walks and single runs asked for.")
    ] = 500,
    database_url: of.DatabaseUrl = None,
    work_dir: of.WorkDir = None,
    settings: of.Set = None,
    server_settings: of.ServerSet = None,
    max_page_p99_ms: of.MaxPage = None,
    max_run_p99_ms: of.MaxRun = None,
) -> None:
    """Pages and single runs over the real API, on a history filled by COPY."""
    wanted = wanted_of(
        modes_of("postgres"),
        database_url=database_url,
        work_dir=work_dir,
        settings=settings,
        server_settings=server_settings,
    )
    bounds = bounds_of(max_page_p99_ms=max_page_p99_ms, max_run_p99_ms=max_run_p99_ms)
    from app.load.scenarios.history import History, measure

    one = History(rows, min(tenants, rows), requests)
    _carry_out(lambda place, show: measure(place, one, show), wanted, out, bounds)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of earlier load runs.")],
    out: of.Out,
) -> None:
    """Several runs side by side in one report; nothing is measured."""
    if len(folders) < 2:
        raise ConfigError("compare needs at least two folders of earlier load runs")
    _require_tools()
    from app.load.compare import compared, read_all
    from app.load.progress import Show
    from app.load.run import finish

    raise typer.Exit(finish(compared(read_all(folders)), out, Show()))


def _require_tools() -> None:
    """Raises ConfigError where the package was installed without what only load runs need."""
    if importlib.util.find_spec("hdrh") is None:
        raise ConfigError("load runs need the extra `carillon[embedded]`, which is not installed")


def _carry_out(
    scenario: Scenario,
    wanted: Wanted,
    out: Path,
    bounds: Sequence[Bound],
    *,
    repeat: int = 1,
    modes: Sequence[ClaimMode] = (),
) -> None:
    _require_tools()
    from app.load.progress import Show
    from app.load.run import Order, carry_out

    order = Order(scenario, wanted, out, repeat, bounds, tuple(sys.argv[1:]), modes)
    raise typer.Exit(carry_out(order, Show()))
