"""Small load runs for real: real replicas, a real target, and what goes wrong is seen."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.load.progress import silent
from app.load.scenarios import burst, history, planner, steady
from app.load.stage import Accident, Stage
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.eventually import eventually
from tests.load.scenario_runs import measured, require_exactly_once
from tests.load.test_summary import KEYS
from tests.system.replicas import plain_environment

SCHEDULES = 200
WITHIN = 120.0


async def burst_with(dsn: str, accident: Accident | None = None) -> dict[str, Any]:
    wanted = burst.Burst(SCHEDULES, tenants=10)
    return await measured(dsn, lambda place: burst.measure(place, wanted, silent(), accident=accident))


async def test_a_burst_is_delivered_exactly_once_and_everything_is_measured(dsn: str) -> None:
    content = await burst_with(dsn)

    require_exactly_once(content, SCHEDULES)
    assert [content[key] for key in ("schedules", "tenants", "executors")] == [SCHEDULES, 10, 2]
    for key in ("planned_per_s", "delivered_per_s", "recorded_per_s", "wal_bytes_per_run"):
        assert content[key] > 0, key
    late = content["lateness_ms"]
    assert 0 < late["p50"] <= late["p90"] <= late["p99"] <= late["p999"] <= late["max"]
    used = content["cpu_us_per_run"]
    assert used["executor"] > 0
    assert used["postgres"] is None, "the server is not the harness's own here"
    series = content["series"]
    for column in ("due", "planned", "delivered", "recorded"):
        assert sum(series[column]) == SCHEDULES, column
    assert max(series["backlog"]) > 0
    assert series["backlog"][-1] == 0


async def test_a_planted_loss_and_a_planted_duplicate_are_counted_and_make_the_run_bad(dsn: str) -> None:
    async def lose_one_and_repeat_one(stage: Stage, _first: datetime) -> None:
        async with stage.place.connection() as own:
            await own.execute("DELETE FROM schedule WHERE id = (SELECT id FROM schedule LIMIT 1)")
            await eventually(lambda: own.fetchval("SELECT count(*) > 0 FROM job_run"))
            repeated = await own.fetchval("SELECT idempotency_key FROM job_run LIMIT 1")
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(stage.target.url, headers={"webhook-id": str(repeated)})

    content = await burst_with(dsn, lose_one_and_repeat_one)

    assert (content["expected"], content["delivered"], content["missing"]) == (SCHEDULES, SCHEDULES - 1, 1)
    assert content["recorded"] == SCHEDULES - 1
    assert content["duplicates"] == 1
    assert content["verdict"]["ok"] is False


async def test_planner_writes_every_run_and_advances_every_schedule(dsn: str) -> None:
    wanted = planner.Planning(500, tenants=20)

    content = await measured(dsn, lambda place: planner.measure(place, wanted, silent()))

    assert content["verdict"]["ok"] is True, content["verdict"]
    assert content["planned"] == 500
    assert content["planned_per_s"] > 0
    assert content["cpu_us_per_run"]["planner"] > 0


async def test_steady_measures_idling_first_and_a_receiver_without_a_ledger_is_said_to_have_counted_nothing(
    dsn: str, receiver: Receiver
) -> None:
    wanted = steady.Steady(rate=50, seconds=2, idle_schedules=1_000, idle_seconds=1, tenants=10)

    content = await measured(
        dsn, lambda place: steady.measure(place, wanted, silent()), target_url=receiver.url
    )

    assert content["verdict"]["ok"] is True, content["verdict"]
    assert "no ledger" in content["verdict"]["notes"][0]
    assert content["expected"] == content["recorded"] == 100
    assert [content[key] for key in ("delivered", "duplicates", "missing")] == [None] * 3
    assert len({one.delivery_id for one in receiver.received if one.delivery_id}) == 100
    assert content["idle_schedules"] == 1_000
    assert content["idle_cpu_percent"] is None, "the server is not the harness's own here"
    assert set(content["idle_cpu_percent_by_part"]) == {"planner", "executor"}
    assert content["recorded_per_s"] is None


async def test_history_reads_what_it_has_filled(dsn: str) -> None:
    wanted = history.History(rows=2_000, tenants=20, requests=10)

    content = await measured(dsn, lambda place: history.measure(place, wanted, silent()))

    assert content["verdict"]["ok"] is True, content["verdict"]
    assert [content[key] for key in ("rows", "runs_read")] == [2_000, 10]
    assert content["run_p99_ms"] > 0
    assert content["page_p99_ms"] > 0


async def test_a_database_with_foreign_data_is_left_alone(dsn: str, db: Connection) -> None:
    await db.execute("INSERT INTO tenant VALUES (gen_random_uuid(), 'somebody', now())")

    code, _, errors = await carillon("load", "burst", "--database-url", dsn, "--out", "unused")

    assert code == 2
    assert "database of its own" in errors
    assert await db.fetchval("SELECT count(*) FROM tenant") == 1


async def test_the_command_starts_all_it_needs_and_writes_its_summary(tmp_path: Path) -> None:
    code, _, errors = await carillon(
        *("load", "burst", "--schedules", str(SCHEDULES), "--tenants", "10", "--claim-mode", "kafka"),
        *("--out", str(tmp_path), "--set", "planner_lookahead=2s"),
    )

    assert code == 0, errors
    content = json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "report.html").stat().st_size > 0
    assert set(KEYS) <= set(content)
    assert content["claim_mode"] == "kafka"
    assert [content[key] for key in ("delivered", "recorded")] == [SCHEDULES] * 2
    assert content["cpu_us_per_run"]["postgres"] > 0
    assert content["cpu_us_per_run"]["broker"] is not None
    assert content["statements_per_run"] > 0
    assert content["env"]["server_settings"]["fsync"] == "on"
    assert content["env"]["server_settings"]["synchronous_commit"] == "on"


async def test_claims_settles_every_run_and_a_broken_bound_makes_the_command_fail(
    tmp_path: Path, dsn: str
) -> None:
    code, _, errors = await carillon(
        *("load", "claims", "--runs", "500", "--tenants", "20", "--database-url", dsn),
        *("--out", str(tmp_path), "--min-claim-settle-per-s", "1e9"),
    )

    assert code == 1, errors
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["attempt_rows"] == content["recorded"] == content["expected"] == 500
    assert content["claim_settle_per_s"] > 0
    assert content["cpu_us_per_run"]["executor"] > 0
    [problem] = content["verdict"]["problems"]
    assert "--min-claim-settle-per-s" in problem


@pytest.mark.parametrize(
    "wrong",
    [
        ("--target", "http://example.com:8000"),
        ("--claim-mode", "redis"),
        ("--set", "executor_slots"),
        ("--work-dir", "/dev/shm"),
    ],
    ids=lambda wrong: wrong[0],
)
async def test_a_wrong_command_line_is_refused_before_anything_is_started(
    wrong: tuple[str, str], tmp_path: Path
) -> None:
    code, _, errors = await carillon("load", "burst", "--out", str(tmp_path), *wrong)

    assert code == 2
    assert wrong[0] in errors


async def carillon(*arguments: str) -> tuple[int, str, str]:
    """Run the command line; its exit code and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app", *arguments),
        env=plain_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN):
        said, errors = await process.communicate()
    return process.returncode or 0, said.decode(), errors.decode()
