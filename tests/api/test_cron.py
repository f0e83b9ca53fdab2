"""Trying out cron expressions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Tenancy, assert_problem

PATH = "/v1/cron/preview"


async def test_the_next_fires_are_listed_with_what_clock_changes_do(tenant: Tenancy) -> None:
    body = {"cron": "30 2 * * *", "timezone": "Europe/Berlin", "after": "2026-03-28T00:00:00Z", "count": 3}
    fires = (await tenant.client.post(PATH, json=body)).json()["fires"]
    assert [fire["at"] for fire in fires] == [
        "2026-03-28T01:30:00Z",
        "2026-03-29T01:00:00Z",
        "2026-03-30T00:30:00Z",
    ]
    assert fires[1]["local"] == "2026-03-29T03:00:00+02:00"
    assert [fire["note"] is None for fire in fires] == [True, False, True]


async def test_the_preview_of_a_schedule_is_what_it_will_do(tenant: Tenancy) -> None:
    rule = {"cron": "H H(1-5) * * *", "timezone": "UTC"}
    body = {
        "name": "hashed",
        "recurrence": {"kind": "cron", **rule},
        "target": {"url": "https://example.com/"},
    }
    made = (await tenant.client.post("/v1/schedules", json=body)).json()
    preview = await tenant.client.post(PATH, json={**rule, "schedule_id": made["id"], "count": 1})
    assert preview.json()["fires"][0]["at"] == made["next_fire_at"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"cron": "61 * * * *"}, "/cron"),
        ({"cron": "a" * 257}, "/cron"),
        ({"cron": 5}, "/cron"),
        ({"timezone": "Mars/Olympus"}, "/timezone"),
        ({"timezone": "../../etc/passwd"}, "/timezone"),
        ({"count": 0}, "/count"),
        ({"count": 101}, "/count"),
        ({"count": "5"}, "/count"),
        ({"after": "9999-12-31T23:59:59Z"}, "/after"),
        ({"schedule_id": "mine"}, "/schedule_id"),
        ({"expression": "* * * * *"}, "/expression"),
    ],
)
async def test_a_faulty_question_is_refused_by_field(
    tenant: Tenancy, change: dict[str, Any], pointer: str
) -> None:
    response = await tenant.client.post(PATH, json={"cron": "* * * * *", **change})
    errors = assert_problem(response, 422, "invalid-input")["errors"]
    assert [error["pointer"] for error in errors] == [pointer]


async def test_a_faulty_expression_and_a_faulty_zone_are_named_together(tenant: Tenancy) -> None:
    response = await tenant.client.post(PATH, json={"cron": "61 * * * *", "timezone": "Mars/Olympus"})
    errors = assert_problem(response, 422, "invalid-input")["errors"]
    assert [error["pointer"] for error in errors] == ["/timezone", "/cron"]
