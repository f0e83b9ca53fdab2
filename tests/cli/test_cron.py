"""`carillon cron preview`: what it prints, what it refuses, and how."""

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli.cron import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["preview", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def fires(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(document) == ["fires", "remarks"]
    listed: list[dict[str, Any]] = document["fires"]
    return listed


def test_json_is_the_agreed_document() -> None:
    arguments = ("30 2 * * *", "--tz", "Europe/Berlin", "--after", "2026-03-28T00:00:00Z", "-n", "2")
    assert fires(*arguments) == [
        {"at": "2026-03-28T01:30:00Z", "local": "2026-03-28T02:30:00+01:00", "note": None},
        {
            "at": "2026-03-29T01:00:00Z",
            "local": "2026-03-29T03:00:00+02:00",
            "note": "fires 03:00 instead of 02:30: the clock jumps from 02:00 to 03:00",
        },
    ]


def test_the_table_is_for_reading() -> None:
    result = run("@daily", "--after", "2026-01-01T00:00:00Z", "-n", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "UTC                   UTC",
        "2026-01-02T00:00:00Z  2026-01-02T00:00:00+00:00",
        "2026-01-03T00:00:00Z  2026-01-03T00:00:00+00:00",
    ]


def test_the_example_in_the_documentation_is_what_the_command_prints() -> None:
    text = (Path(__file__).parents[2] / "docs" / "time.md").read_text(encoding="utf-8")
    example = text.partition("```console\n")[2].partition("```")[0]
    command, _, printed = example.partition("\n")
    result = run(*shlex.split(command)[4:])
    assert command.startswith("$ carillon cron preview ")
    assert result.stdout == printed


@pytest.mark.parametrize(
    ("expression", "remark"),
    [
        ("0 12 13 * 5", "Day of month and day of week are both set: it fires when either matches."),
        (
            "0 12 13 * */5",
            "Day of month and day of week are both set: both must match, since one begins with *.",
        ),
        (
            "0 0 */2 * 3",
            "Day of month and day of week are both set: both must match, since one begins with *.",
        ),
    ],
)
def test_two_day_fields_are_explained_to_people(expression: str, remark: str) -> None:
    assert json.loads(run(expression, "-n", "1", "-o", "json").stdout)["remarks"] == [remark]
    assert run(expression, "-n", "1").stdout.splitlines()[-1] == remark
    assert "both" not in run("0 12 13 * *", "-n", "1").stdout


@pytest.mark.parametrize(
    ("after", "first"),
    [
        ("2026-06-01T00:00:00Z", "2026-06-01T01:00:00Z"),
        ("2026-06-01T00:00:00+02:00", "2026-05-31T23:00:00Z"),
        ("2026-06-01T00:00:00", "2026-05-31T23:00:00Z"),
        ("2026-06-01", "2026-05-31T23:00:00Z"),
    ],
)
def test_a_start_without_an_offset_is_read_on_the_clock_of_the_zone(after: str, first: str) -> None:
    assert fires("@hourly", "--tz", "Europe/Berlin", "--after", after, "-n", "1")[0]["at"] == first


def test_without_a_start_the_list_begins_now_and_has_ten_fires() -> None:
    before = datetime.now(UTC)
    listed = fires("* * * * *")
    assert len(listed) == 10
    assert datetime.fromisoformat(listed[0]["at"]) > before.replace(second=0, microsecond=0)


def test_h_says_for_which_schedule_it_was_hashed() -> None:
    result = run("H H * * *", "-n", "1")
    assert "this is for 00000000-0000-0000-0000-000000000000 (choose with --schedule-id)" in result.stdout
    schedule = "0192f0c1-2345-7000-8000-000000000001"
    listed = fires("H H * * *", "--schedule-id", schedule, "--after", "2026-01-01T00:00:00Z", "-n", "1")
    assert listed[0]["at"] == "2026-01-01T00:21:00Z"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("77 * * * *",), "EXPR: minute: 77 is outside 0 to 59\n"),
        (("0 0 31 4 *",), "EXPR: day-of-month: never fires, none of its months has such a day\n"),
        (("0 0 0 29 2 *",), "EXPR: has 6 fields; it must have 5"),
        (("0 0 0 29 2 *",), "seconds and years are not supported"),
        (("@every 5m",), "for an interval use the kind 'every' with every_seconds"),
        (("CRON_TZ=UTC 0 0 * * *",), "(a zone goes into --tz)"),
        (("@daily", "--tz", "Europe/Berln"), "(did you mean 'Europe/Berlin'?)"),
        (("@daily", "--tz", "New York"), "(did you mean 'America/New_York'?)"),
        (("@daily", "--tz", "berlin"), "(did you mean 'Europe/Berlin'?)"),
        (("",), "EXPR: has 0 fields"),
        (("0 0 1 1 *", "--after", "9999-06-01T00:00:00Z"), "EXPR: never fires"),
        (("@daily", "--tz", "europe/berlin"), "did you mean 'Europe/Berlin'?"),
        (("@daily", "--tz", "../UTC"), "--tz: '../UTC' is not a time zone"),
        (("@daily", "--after", "yesterday"), "--after: 'yesterday' is not an ISO 8601 date and time"),
        (("@daily", "--after", "2026-02-30T00:00:00Z"), "--after: "),
        (("@daily", "--after", "9999-12-31T23:59:59-10:00"), "--after: "),
        (("@daily", "-n", "0"), "-n"),
        (("@daily", "-n", "1001"), "-n"),
        (("@daily", "-n", "many"), "-n"),
        (("@daily", "-o", "yaml"), "-o"),
        (("@daily", "--schedule-id", "7"), "--schedule-id"),
        ((), "EXPR"),
    ],
)
def test_what_is_wrong_is_said_on_stderr_with_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    for output in ((), ("-o", "json")):
        if output and "-o" in arguments:
            continue
        result = run(*arguments, *output)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""


def test_the_largest_preview_has_a_thousand_fires() -> None:
    listed = fires("* * * * *", "--after", "2026-01-01T00:00:00Z", "-n", "1000")
    assert len(listed) == 1_000
    assert listed[-1]["at"] == "2026-01-01T16:40:00Z"


def test_the_command_loads_neither_database_nor_web_framework() -> None:
    script = (
        "import sys; from app.cli.cron import app\n"
        "assert not {'croniter', 'cronsim', 'app.domain.recurrence'} & set(sys.modules)\n"
        "app(['preview', '@daily', '-n', '1'], standalone_mode=False)\n"
        "assert not {'asyncpg', 'fastapi', 'aiohttp', 'pydantic_settings'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
