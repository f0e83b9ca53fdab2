"""The command line: exit codes that scripts rely on, what the doctor finds, and that no secret is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from app.__main__ import cli
from app.cli import doctor
from app.errors import StoreUnavailable
from app.settings import LogSettings, Role, Settings
from app.store.pool import Connection
from tests.eventually import eventually

ROOT = Path(__file__).parents[1]
NOBODY = "postgresql://carillon:CANARY-pass@127.0.0.1:1/carillon"
"""Where nothing listens."""


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SCHEDULER_"):
            monkeypatch.delenv(name)


def call(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(
        cli, arguments, env={f"SCHEDULER_{name}": value for name, value in environ.items()}
    )


def process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {f"SCHEDULER_{name}": value for name, value in environ.items()}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT, env=os.environ | given, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_the_version_is_that_of_the_package() -> None:
    assert call("--version").output == f"carillon {version('carillon')}\n"


def test_the_module_and_the_command_are_the_same() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"carillon {version('carillon')}\n")


def test_small_commands_import_nothing_large() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from app.__main__ import cli;"
        "CliRunner().invoke(cli, sys.argv[1:]); print(*sys.modules)"
    )
    for arguments in (["--version"], ["cron", "preview", "@daily", "-n", "1"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        large = {
            "pydantic_settings",
            "fastapi",
            "aiohttp",
            "asyncpg",
            "uvicorn",
            "prometheus_client",
        }
        assert large & set(done.stdout.split()) == set(), arguments


def test_every_command_is_there() -> None:
    shown = call("--help").output
    for command in ("serve", "migrate", "doctor", "check-config", "cron", "dev"):
        assert command in shown


def test_cron_preview_is_mounted() -> None:
    done = call(
        "cron", "preview", "0 12 * * *", "--after", "2026-01-01T00:00:00+00:00", "-n", "1", "-o", "json"
    )
    assert done.exit_code == 0
    assert json.loads(done.stdout)["fires"][0]["at"].startswith("2026-01-01T12:00:00")


@pytest.mark.parametrize("command", [("serve",), ("migrate",), ("migrate", "status"), ("check-config",)])
def test_a_wrong_configuration_ends_with_two_and_names_the_variable(command: tuple[str, ...]) -> None:
    done = call(*command, DATABASE_URL=NOBODY, EXECUTOR_SLOT="3")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "carillon: the configuration has one fault:\n  SCHEDULER_EXECUTOR_SLOT: " in done.stderr
    assert "CANARY" not in done.output


def test_a_wrong_command_line_ends_with_two() -> None:
    assert call("start").exit_code == 2
    assert call("migrate", "down").exit_code == 2
    assert call("dev", "--replicas", "0").exit_code == 2
    assert call("dev", "--claim-mode", "redis").exit_code == 2


def test_wrong_roles_on_the_command_line_are_a_wrong_configuration() -> None:
    done = call("serve", "--roles", "api,worker", DATABASE_URL=NOBODY)
    assert done.exit_code == 2
    assert "--roles: 'worker' is not a role. Allowed: api, planner, executor, maintenance\n" in done.stderr


@pytest.mark.parametrize("command", [("migrate",), ("migrate", "status")])
def test_an_unreachable_database_ends_with_one_and_without_the_password(command: tuple[str, ...]) -> None:
    done = process(*command, DATABASE_URL=NOBODY)
    assert done.returncode == 1
    assert done.stderr.startswith("carillon: 127.0.0.1:1/carillon: the database cannot be reached")
    assert "Traceback" not in done.stderr
    assert "CANARY" not in done.stdout + done.stderr


def test_check_config_shows_what_is_in_force_and_no_secret() -> None:
    done = call("check-config", DATABASE_URL=NOBODY, EXECUTOR_SLOTS="7", API_ADMIN_KEY="CANARY-admin-key-1")
    assert done.exit_code == 0
    assert "SCHEDULER_EXECUTOR_SLOTS=7\n" in done.stdout
    assert "SCHEDULER_PLANNER_TICK=1s\n" in done.stdout
    assert "SCHEDULER_DATABASE_URL=(set: 127.0.0.1:1/carillon; the rest is not shown)\n" in done.stdout
    assert "SCHEDULER_API_ADMIN_KEY=(set, not shown)\n" in done.stdout
    assert "CANARY" not in done.output


def test_check_config_prints_the_reference_without_any_configuration() -> None:
    done = call("check-config", "--reference")
    assert done.stdout == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_migrate_brings_a_database_up_to_date_once(empty_dsn: str) -> None:
    before = call("migrate", "status", DATABASE_URL=empty_dsn)
    assert before.exit_code == 3
    assert "pending  0001_" in before.stdout
    first = call("migrate", DATABASE_URL=empty_dsn)
    assert first.exit_code == 0
    assert "applied" in first.stdout
    assert call("migrate", DATABASE_URL=empty_dsn).stdout.endswith("up to date\n")
    after = call("migrate", "status", DATABASE_URL=empty_dsn)
    assert after.exit_code == 0
    assert "pending" not in after.stdout


def test_serve_refuses_a_database_without_our_schema_with_three(empty_dsn: str) -> None:
    done = process("serve", DATABASE_URL=empty_dsn)
    assert done.returncode == 3
    assert "carillon migrate" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_names_the_database_that_it_could_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(_settings: Settings) -> int:
        raise StoreUnavailable("the database cannot be reached")

    def leave(_settings: LogSettings) -> None: ...

    monkeypatch.setattr("app.main.serve", serve)
    monkeypatch.setattr("app.logs.configure", leave)
    done = call("serve", DATABASE_URL=NOBODY)
    assert done.exit_code == 1
    assert done.stderr == "carillon: 127.0.0.1:1/carillon: the database cannot be reached\n"


def test_serve_returns_the_status_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    async def serve(settings: Settings) -> int:
        seen.append(settings)
        return 1

    def leave(_settings: LogSettings) -> None: ...

    monkeypatch.setattr("app.main.serve", serve)
    monkeypatch.setattr("app.logs.configure", leave)
    assert call("serve", "--roles", "planner", DATABASE_URL=NOBODY, ROLES="api").exit_code == 1
    assert seen[0].roles == {Role.PLANNER}


def test_a_broken_replica_is_logged_without_secrets_and_ends_with_one() -> None:
    script = (
        "from app import main\n"
        "async def serve(settings):\n"
        "    password = settings.database.dsn\n"
        "    raise ExceptionGroup('parts', [RuntimeError(f'cannot use {password}')])\n"
        "main.serve = serve\n"
        "from app.__main__ import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "serve"],
        cwd=ROOT, env=os.environ | {"SCHEDULER_DATABASE_URL": NOBODY}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    line = json.loads(done.stderr)
    assert line["event"] == "replica.broken"
    assert "RuntimeError" in line["traceback"]
    assert "CANARY" not in done.stderr


def test_the_doctor_finds_nothing_wrong_with_a_good_installation(dsn: str) -> None:
    done = call("doctor", DATABASE_URL=dsn)
    assert [line[:4] for line in done.stdout.splitlines()] == ["OK  "] * 5
    assert done.exit_code == 0


async def test_the_doctor_names_the_version_as_the_server_does(dsn: str, db: Connection) -> None:
    number = int(await db.fetchval("SELECT current_setting('server_version_num')"))
    found = [finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})]
    assert found[1].text.endswith(f" answers, PostgreSQL {number // 10_000}.{number % 10_000}")


def test_the_doctor_tells_of_a_wrong_configuration() -> None:
    done = call("doctor", DATABASE_URL=NOBODY, LOG_LEVEL="loud")
    assert done.exit_code == 2
    assert done.stdout.startswith("FAIL configuration: ")
    assert "SCHEDULER_LOG_LEVEL" in done.stdout


def test_the_doctor_tells_of_an_unreachable_database_without_the_password() -> None:
    done = call("doctor", DATABASE_URL=NOBODY)
    assert done.exit_code == 1
    assert "FAIL database: 127.0.0.1:1/carillon: " in done.stdout
    assert "CANARY" not in done.output


def test_the_doctor_tells_of_a_missing_schema(empty_dsn: str) -> None:
    done = call("doctor", DATABASE_URL=empty_dsn)
    assert done.exit_code == 3
    assert "FAIL schema: " in done.stdout
    assert "carillon migrate" in done.stdout


def test_the_doctor_tells_of_a_database_that_does_not_exist(dsn: str) -> None:
    elsewhere = urlsplit(dsn)._replace(path="/nowhere").geturl()
    done = call("doctor", DATABASE_URL=elsewhere)
    assert done.exit_code == 1
    assert "FAIL database: " in done.stdout


async def test_the_doctor_tells_of_missing_months(dsn: str, db: Connection) -> None:
    for (table,) in await db.fetch(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'job_run'::regclass"
    ):
        if table.startswith("job_run_2"):
            await db.execute(f"ALTER TABLE job_run DETACH PARTITION {table}")
    found = {finding.subject: finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})}
    assert not found["months"].is_good
    assert found["schema"].is_good


async def test_the_doctor_tells_of_months_that_end_soon(
    dsn: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HORIZON_WANTED", timedelta(days=1000))
    found = {finding.subject: finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})}
    assert not found["months"].is_good
    assert "that is soon" in found["months"].text


async def test_the_doctor_tells_of_a_clock_that_is_off(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def behind(_conn: Connection) -> datetime:
        return datetime.now(UTC) - timedelta(seconds=3)

    monkeypatch.setattr(doctor, "database_now", behind)
    found = {finding.subject: finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})}
    assert not found["clock"].is_good
    assert "+3.0" in found["clock"].text


async def test_the_doctor_tells_of_a_server_that_is_too_old(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "OLDEST_POSTGRES", 99)
    found = [finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})]
    assert [finding.subject for finding in found if not finding.is_good] == ["database"]
    assert "99 or newer is needed" in found[1].text


async def test_the_doctor_survives_a_database_that_goes_away(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_conn: Connection) -> datetime:
        raise StoreUnavailable("the connection is lost")

    monkeypatch.setattr(doctor, "database_now", gone)
    found = [finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})]
    assert not found[-1].is_good
    assert "the connection is lost" in found[-1].text


async def test_the_doctor_leaves_no_connection(dsn: str, db: Connection) -> None:
    assert [finding async for finding in doctor.examine({"SCHEDULER_DATABASE_URL": dsn})]

    async def is_gone() -> bool:
        names = await db.fetch(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        )
        return "carillon doctor" not in {name for (name,) in names}

    await eventually(is_gone)  # the server notices a little later than the client
