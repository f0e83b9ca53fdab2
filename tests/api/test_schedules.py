"""Schedules through the API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from app.store.pool import Pool, acquire
from tests.api.conftest import Switches, Tenancy, assert_problem, created, schedule_body


async def test_a_created_schedule_is_active_and_reads_back_the_same(tenant: Tenancy) -> None:
    response = await tenant.client.post("/v1/schedules", json=schedule_body())

    assert response.status_code == 201, response.text
    made = response.json()
    assert made["status"] == "active"
    assert made["version"] == 1
    assert made["recurrence"] == {"kind": "cron", "cron": "*/5 * * * *", "timezone": "Europe/Berlin"}
    assert made["target"]["url"] == "https://example.com/hook"
    assert datetime.fromisoformat(made["next_fire_at"]) > datetime.now(UTC) - timedelta(minutes=5)
    assert response.headers["location"] == f"/v1/schedules/{made['id']}"
    assert response.headers["etag"] == '"1"'
    read = await tenant.client.get(response.headers["location"])
    assert read.json() == made


async def test_secret_header_values_are_not_shown_and_not_taken_back_masked(tenant: Tenancy) -> None:
    target = {"url": "https://example.com/", "headers": {"Authorization": "Bearer canary-7c1"}}
    made = await created(tenant, target=target)

    assert made["target"]["headers"] == {"Authorization": "[redacted]"}
    echoed = await tenant.client.patch(f"/v1/schedules/{made['id']}", json={"target": made["target"]})
    body = assert_problem(echoed, 422, "invalid-input")
    assert body["errors"][0]["pointer"] == "/target/headers/Authorization"
    assert "canary-7c1" not in (await tenant.client.get(f"/v1/schedules/{made['id']}")).text


async def test_a_change_replaces_what_is_given_and_keeps_the_rest(tenant: Tenancy) -> None:
    made = await created(tenant)
    changed = await tenant.client.patch(
        f"/v1/schedules/{made['id']}",
        json={"name": "hourly", "recurrence": {"kind": "every", "every_seconds": 3600}},
    )

    assert changed.status_code == 200, changed.text
    body = changed.json()
    assert body["name"] == "hourly"
    assert body["recurrence"]["kind"] == "every"
    assert body["target"] == made["target"]
    assert body["version"] == 2
    assert changed.headers["etag"] == '"2"'


async def test_an_empty_change_changes_nothing(tenant: Tenancy) -> None:
    made = await created(tenant)
    assert (await tenant.client.patch(f"/v1/schedules/{made['id']}", json={})).json() == made


@pytest.mark.parametrize(
    "field", ["name", "recurrence", "target", "retry", "misfire", "overlap", "expires_after_seconds"]
)
async def test_null_is_not_a_way_to_leave_a_field_out(tenant: Tenancy, field: str) -> None:
    made = await created(tenant)
    refused = await tenant.client.patch(f"/v1/schedules/{made['id']}", json={field: None})
    body = assert_problem(refused, 422, "invalid-input")
    assert body["errors"][0]["pointer"] == f"/{field}"


async def test_a_change_of_a_version_that_has_passed_is_refused(tenant: Tenancy) -> None:
    made = await created(tenant)
    path = f"/v1/schedules/{made['id']}"
    first = await tenant.client.patch(path, json={"name": "first"}, headers={"If-Match": '"1"'})
    assert first.status_code == 200

    late = await tenant.client.patch(path, json={"name": "late"}, headers={"If-Match": '"1"'})
    assert_problem(late, 412, "precondition-failed")
    gone = await tenant.client.delete(path, headers={"If-Match": '"1"'})
    assert_problem(gone, 412, "precondition-failed")
    odd = await tenant.client.patch(path, json={"name": "odd"}, headers={"If-Match": "W/1"})
    assert_problem(odd, 412, "precondition-failed")
    assert (await tenant.client.get(path)).json()["name"] == "first"


async def test_pause_resume_and_their_reason(tenant: Tenancy) -> None:
    made = await created(tenant)
    path = f"/v1/schedules/{made['id']}"

    paused = await tenant.client.post(f"{path}/pause", json={"reason": "maintenance"})
    assert (paused.status_code, paused.json()["status"]) == (200, "paused")
    assert paused.json()["status_reason"] == "maintenance"
    resumed = await tenant.client.post(f"{path}/resume")
    assert (resumed.status_code, resumed.json()["status"]) == (200, "active")
    assert resumed.json()["status_reason"] is None
    bare = await tenant.client.post(f"{path}/pause")
    assert (bare.status_code, bare.json()["status"]) == (200, "paused")


async def test_run_now_answers_with_the_run_and_where_it_is_and_announces_it(
    tenant: Tenancy, switches: Switches
) -> None:
    made = await created(tenant)
    started = await tenant.client.post(f"/v1/schedules/{made['id']}/run")

    assert started.status_code == 202, started.text
    run = started.json()
    assert (run["status"], run["origin"], run["schedule_id"]) == ("pending", "manual", made["id"])
    found = await tenant.client.get(started.headers["location"])
    assert found.json()["id"] == run["id"]
    assert found.json()["attempts"] == []
    assert [str(ref.id) for ref in switches.announced] == [run["id"]]


async def test_a_schedule_that_cannot_be_understood_is_listed_with_its_problem(
    tenant: Tenancy, pool: Pool
) -> None:
    made = await created(tenant)
    async with acquire(pool) as conn:
        await conn.execute('UPDATE schedule SET recurrence = \'{"kind": "moon"}\' WHERE id = $1', made["id"])

    listed = (await tenant.client.get("/v1/schedules")).json()["schedules"]
    one = (await tenant.client.get(f"/v1/schedules/{made['id']}")).json()
    assert listed == [one]
    assert (one["name"], one["recurrence"], one["target"]) == (made["name"], None, None)
    assert "cannot be understood" in one["status_reason"]
    paused = await tenant.client.post(f"/v1/schedules/{made['id']}/pause")
    assert paused.status_code == 409
    assert (await tenant.client.delete(f"/v1/schedules/{made['id']}")).status_code == 204


async def test_sending_the_same_interval_again_does_not_move_its_phase(tenant: Tenancy) -> None:
    rule = {"kind": "every", "every_seconds": 3600}
    made = await created(tenant, recurrence=rule)
    same = await tenant.client.patch(f"/v1/schedules/{made['id']}", json={"recurrence": rule})
    assert same.json() == made

    other = {"kind": "every", "every_seconds": 1800}
    moved = await tenant.client.patch(f"/v1/schedules/{made['id']}", json={"recurrence": other})
    assert moved.json()["recurrence"]["anchor"] > made["recurrence"]["anchor"]


async def test_a_deleted_schedule_is_gone_but_its_runs_stay(tenant: Tenancy) -> None:
    made = await created(tenant)
    path = f"/v1/schedules/{made['id']}"
    run = (await tenant.client.post(f"{path}/run")).json()

    assert (await tenant.client.delete(path)).status_code == 204
    assert_problem(await tenant.client.get(path), 404, "not-found")
    assert_problem(await tenant.client.delete(path), 404, "not-found")
    assert (await tenant.client.get("/v1/schedules")).json()["schedules"] == []
    kept = (await tenant.client.get(f"/v1/runs/{run['id']}")).json()
    assert (kept["status"], kept["reason"]) == ("cancelled", "schedule_deleted")
    assert (await tenant.client.get(f"{path}/dispositions")).status_code == 200


async def test_every_fault_of_a_body_is_named_at_once(tenant: Tenancy) -> None:
    refused = await tenant.client.post(
        "/v1/schedules",
        json=schedule_body(
            name="  ",
            recurrence={"kind": "cron", "cron": "99 * * * *"},
            target={"url": "ftp://example.com"},
            retry={"max_attempts": 9},
        ),
    )
    body = assert_problem(refused, 422, "invalid-input")
    assert [error["pointer"] for error in body["errors"]] == [
        "/name",
        "/recurrence/cron",
        "/target/url",
        "/retry/max_attempts",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://[2002:7f00:1::]/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://localhost/",
        "http://10.0.0.1/",
    ],
)
async def test_forbidden_addresses_are_refused_at_create_and_at_change_alike(
    tenant: Tenancy, url: str
) -> None:
    made = await created(tenant)
    at_create = await tenant.client.post("/v1/schedules", json=schedule_body(target={"url": url}))
    at_change = await tenant.client.patch(f"/v1/schedules/{made['id']}", json={"target": {"url": url}})

    first = assert_problem(at_create, 422, "invalid-input")
    second = assert_problem(at_change, 422, "invalid-input")
    assert first["errors"] == second["errors"]
    assert first["errors"][0]["pointer"] == "/target/url"


async def test_a_one_off_in_the_past_is_refused(tenant: Tenancy) -> None:
    past = {"kind": "once", "at": "2020-01-01T00:00:00Z"}
    body = assert_problem(
        await tenant.client.post("/v1/schedules", json=schedule_body(recurrence=past)), 422, "invalid-input"
    )
    assert body["errors"][0]["pointer"] == "/recurrence/at"


async def test_a_walk_over_schedules_sees_each_once_newest_first(tenant: Tenancy, pool: Pool) -> None:
    made = [(await created(tenant, name=f"number {number}"))["id"] for number in range(7)]
    # One instant for all: only the id tells them apart.
    await pool.execute("UPDATE schedule SET created_at = '2026-01-01T00:00:00.123456Z'")

    seen: list[str] = []
    path = "/v1/schedules?limit=3"
    while path:
        response = await tenant.client.get(path)
        seen += [schedule["id"] for schedule in response.json()["schedules"]]
        path = response.links["next"]["url"] if "next" in response.links else ""
    assert seen == sorted(made, reverse=True)


async def test_deleted_schedules_are_in_no_list_and_cannot_be_asked_for(tenant: Tenancy) -> None:
    response = await tenant.client.get("/v1/schedules?status=deleted")
    (fault,) = assert_problem(response, 422, "invalid-input")["errors"]
    assert (fault["parameter"], fault["detail"]) == (
        "status",
        "must be 'active', 'paused', 'finished' or 'error'",
    )


async def test_the_list_can_be_narrowed_to_a_status(tenant: Tenancy) -> None:
    paused, _active = await created(tenant), await created(tenant)
    await tenant.client.post(f"/v1/schedules/{paused['id']}/pause")

    found = (await tenant.client.get("/v1/schedules?status=paused")).json()["schedules"]
    assert [schedule["id"] for schedule in found] == [paused["id"]]


async def test_dispositions_are_walked_newest_first(tenant: Tenancy, pool: Pool) -> None:
    made = await created(tenant)
    first = datetime(2026, 1, 1, tzinfo=UTC)
    for day in range(5):
        at = first + timedelta(days=day)
        await pool.execute(
            "INSERT INTO disposition (tenant_id, schedule_id, first_at, last_at, occurrences, reason, created_at) "
            "VALUES ($1, $2, $3, $3, 1, 'misfire', now())",
            tenant.id,
            made["id"],
            at,
        )

    seen: list[str] = []
    path = f"/v1/schedules/{made['id']}/dispositions?limit=2"
    while path:
        response = await tenant.client.get(path)
        seen += [one["first_at"] for one in response.json()["dispositions"]]
        path = response.links["next"]["url"] if "next" in response.links else ""
    assert seen == [f"2026-01-0{day}T00:00:00Z" for day in (5, 4, 3, 2, 1)]


async def test_an_unknown_schedule_has_no_dispositions_to_list(tenant: Tenancy) -> None:
    assert_problem(await tenant.client.get(f"/v1/schedules/{uuid4()}/dispositions"), 404, "not-found")
