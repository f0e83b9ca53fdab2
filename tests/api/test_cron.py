"""Trying out cron expressions."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

from app.domain import recurrence
from app.domain.ids import ScheduleId
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


async def test_a_preview_looks_a_hundred_years_ahead(tenant: Tenancy) -> None:
    body = {"cron": "0 0 * 2 1#5", "after": "2026-10-01T00:00:00Z", "count": 100}
    fires = (await tenant.client.post(PATH, json=body)).json()["fires"]
    assert [fire["at"][:10] for fire in fires] == ["2044-02-29", "2072-02-29", "2112-02-29"]


async def test_a_rule_that_is_not_rare_is_previewed_in_full(tenant: Tenancy) -> None:
    for cron in ("* * * * *", "0 0 1 1 *"):
        body = {"cron": cron, "after": "2026-10-01T00:00:00Z", "count": 100}
        assert len((await tenant.client.post(PATH, json=body)).json()["fires"]) == 100


async def test_a_preview_lets_others_run_between_two_fires(
    tenant: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    turns: list[None] = []
    walk = recurrence.preview

    def noted(
        rule: recurrence.Recurrence, after: datetime, count: int, of: ScheduleId
    ) -> list[recurrence.Fire]:
        counts.append(count)
        asyncio.get_running_loop().call_soon(turns.append, None)
        seen.append(len(turns))
        return walk(rule, after, count, of)

    seen: list[int] = []
    monkeypatch.setattr(recurrence, "preview", noted)
    await tenant.client.post(PATH, json={"cron": "0 0 29 2 *", "count": 5})
    assert counts == [1] * 5
    assert seen == list(range(5))
