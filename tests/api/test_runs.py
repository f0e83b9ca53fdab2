"""The history through the API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from app.domain.ids import ScheduleId
from app.store.pool import Connection
from tests.api.conftest import Tenancy, assert_problem
from tests.factories_history import add_attempt, add_runs, add_schedule, lease

HOUR_AGO = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
MANUAL = timedelta(microseconds=123_456)


async def walk(tenancy: Tenancy, path: str) -> list[str]:
    """The ids of all pages, by the Link header."""
    seen: list[str] = []
    while path:
        response = await tenancy.client.get(path)
        assert response.status_code == 200, response.text
        body = response.json()
        seen += [run["id"] for run in body["runs"]]
        assert ("next" in response.links) == (body["next_cursor"] is not None)
        path = response.links["next"]["url"] if "next" in response.links else ""
    return seen


async def test_runs_of_one_instant_are_each_listed_once(tenant: Tenancy, db: Connection) -> None:
    occurrences = [(ScheduleId(uuid4()), HOUR_AGO + MANUAL) for _ in range(15)]
    made = await add_runs(db, tenant.id, occurrences)
    assert await walk(tenant, "/v1/runs?limit=4") == [str(run) for run in sorted(made, reverse=True)]


async def test_rows_that_arrive_during_a_walk_repeat_and_hide_nothing(
    tenant: Tenancy, db: Connection
) -> None:
    schedule = ScheduleId(uuid4())
    made = await add_runs(db, tenant.id, [(schedule, HOUR_AGO + timedelta(seconds=2 * n)) for n in range(12)])
    seen: list[str] = []
    path = "/v1/runs?limit=3"
    for turn in range(30):
        response = await tenant.client.get(path)
        seen += [run["id"] for run in response.json()["runs"]]
        if "next" not in response.links:
            break
        path = response.links["next"]["url"]
        arriving = [HOUR_AGO + timedelta(seconds=2 * turn + 1), HOUR_AGO + timedelta(minutes=5, seconds=turn)]
        await add_runs(db, tenant.id, [(schedule, instant) for instant in arriving])
    else:
        pytest.fail("the walk has no end")
    assert len(seen) == len(set(seen))
    assert {str(run) for run in made} <= set(seen)


async def test_filters_narrow_and_the_window_is_half_open(tenant: Tenancy, db: Connection) -> None:
    one, another = ScheduleId(uuid4()), ScheduleId(uuid4())
    await add_schedule(db, tenant.id, one)
    instants = [HOUR_AGO + timedelta(minutes=minute) for minute in range(4)]
    good = await add_runs(db, tenant.id, [(one, instant) for instant in instants])
    bad = await add_runs(db, tenant.id, [(another, instants[0])], status="failed")
    held = await add_runs(db, tenant.id, [(another, instants[1])], status="retrying")
    await lease(db, held[0], until=timedelta(minutes=1))

    def texts(runs: list[UUID]) -> list[str]:
        return [str(run) for run in runs]

    assert await walk(tenant, f"/v1/runs?schedule_id={one}&limit=2") == texts(good[::-1])
    assert await walk(tenant, "/v1/runs?status=failed") == texts(bad)
    assert await walk(tenant, "/v1/runs?status=running") == texts(held)
    assert await walk(tenant, "/v1/runs?status=retrying") == []
    assert await walk(tenant, "/v1/runs?status=running&status=failed") == texts(held + bad)
    start, end = (instant.isoformat().replace("+00:00", "Z") for instant in (instants[1], instants[3]))
    window = f"/v1/runs?schedule_id={one}&from={start}&to={end}"
    assert await walk(tenant, window) == texts([good[2], good[1]])


async def test_the_default_window_is_the_last_week_and_what_is_planned(
    tenant: Tenancy, db: Connection
) -> None:
    schedule = ScheduleId(uuid4())
    now = datetime.now(UTC).replace(microsecond=0)
    made = await add_runs(
        db, tenant.id, [(schedule, now + delta) for delta in (timedelta(days=-8), timedelta(days=-6))]
    )
    planned = await add_runs(db, tenant.id, [(schedule, now + timedelta(seconds=4))], status="pending")
    await add_runs(db, tenant.id, [(schedule, now + timedelta(hours=1))], status="pending")
    assert await walk(tenant, "/v1/runs") == [str(planned[0]), str(made[1])]


async def test_a_run_is_shown_with_its_attempts_and_without_its_lease(
    tenant: Tenancy, db: Connection
) -> None:
    schedule = ScheduleId(uuid4())
    (run,) = await add_runs(db, tenant.id, [(schedule, HOUR_AGO)], status="retrying")
    await lease(db, run, until=timedelta(minutes=1))
    await add_attempt(db, tenant.id, run, HOUR_AGO, 1, late=timedelta(milliseconds=40))

    response = await tenant.client.get(f"/v1/runs/{run}")
    body = response.json()
    (attempt,) = body.pop("attempts")
    expires, made = body.pop("expires_at"), body.pop("created_at")
    assert datetime.fromisoformat(expires) == HOUR_AGO + timedelta(days=1)
    assert datetime.fromisoformat(made) > HOUR_AGO
    at = HOUR_AGO.isoformat().replace("+00:00", "Z")
    assert body == {
        "id": str(run),
        "schedule_id": str(schedule),
        "scheduled_for": at,
        "status": "running",
        "reason": None,
        "origin": "schedule",
        "attempt": 1,
        "max_attempts": 5,
        "delivery_id": str(run),
        "schedule_version": 1,
        "replay_of": None,
        "fire_after": at,
        "cancel_requested_at": None,
        "finished_at": None,
        "lateness_ms": 42.0,
    }
    assert attempt["request"] == {
        "method": "POST",
        "url": "https://example.com/",
        "headers": {"X-Foo": "bar"},
        "body_bytes": 2,
    }
    assert (attempt["outcome"], attempt["status_code"], attempt["maybe_delivered"]) == ("rejected", 503, True)
    assert (attempt["connect_ms"], attempt["first_byte_ms"], attempt["total_ms"]) == (2.0, 3.5, 4.25)
    assert attempt["response_headers"] == {"content-type": "text/plain"}
    assert attempt["response_excerpt"] == "try later"
    assert "canary" not in response.text
    listed = await tenant.client.get(f"/v1/runs/{run}/attempts")
    assert listed.json() == {"attempts": [attempt]}


async def test_cancelling_ends_a_free_run_asks_a_holder_and_refuses_an_ended_one(
    tenant: Tenancy, db: Connection
) -> None:
    schedule = ScheduleId(uuid4())
    free, held = await add_runs(
        db, tenant.id, [(schedule, HOUR_AGO), (schedule, HOUR_AGO + timedelta(seconds=1))], status="pending"
    )
    (ended,) = await add_runs(db, tenant.id, [(schedule, HOUR_AGO + timedelta(seconds=2))])
    await lease(db, held, until=timedelta(minutes=1))

    first = await tenant.client.post(f"/v1/runs/{free}/cancel")
    assert (first.status_code, first.json()["status"], first.json()["reason"]) == (
        202,
        "cancelled",
        "cancelled",
    )
    second = await tenant.client.post(f"/v1/runs/{held}/cancel")
    assert (second.status_code, second.json()["status"]) == (202, "running")
    assert second.json()["cancel_requested_at"] is not None
    assert_problem(await tenant.client.post(f"/v1/runs/{ended}/cancel"), 409, "conflict")


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=1e3", "limit"),
        ("limit=" + "9" * 5_000, "limit"),
        ("status=unknown", "status"),
        ("status=failed&status=unknown", "status"),
        ("schedule_id=7", "schedule_id"),
        ("from=yesterday", "from"),
        ("from=1700000000", "from"),
        ("from=2026-01-01", "from"),
        ("from=2026-01-01T00:00:00", "from"),
        ("from=2026-02-30T00:00:00Z", "from"),
        ("to=0001-01-01T00:00:00%2B14:00", "to"),
        ("to=9999-12-31T23:59:59-14:00", "to"),
        ("from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", "from"),
        ("form=2026-01-02T00:00:00Z", "form"),
        ("cursor=%00", "cursor"),
        ("cursor=" + "A" * 78, "cursor"),
        ("cursor=" + "A" * 5_000, "cursor"),
    ],
)
async def test_a_faulty_parameter_is_named(tenant: Tenancy, query: str, parameter: str) -> None:
    body = assert_problem(await tenant.client.get(f"/v1/runs?{query}"), 422, "invalid-input")
    assert [error["parameter"] for error in body["errors"]] == [parameter]


async def test_the_extremes_of_the_window_are_allowed(tenant: Tenancy) -> None:
    assert await walk(tenant, "/v1/runs?from=1970-01-01T00:00:00Z&to=9999-12-30T00:00:00Z") == []
    assert await walk(tenant, "/v1/runs?to=1970-01-01T00:00:01Z") == []
    assert await walk(tenant, "/v1/runs?from=9999-12-30T00:00:00Z") == []
