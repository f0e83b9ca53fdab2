"""Cancel, delete, pause, run now and edit while schedules fire: judged at the receiver and in the history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from app.local.answers import Hang, Reply
from app.local.receiver import Receiver
from app.store.pool import Connection
from tests.eventually import eventually
from tests.system.replicas import Fleet, Replica
from tests.system.tenancy import Json, new_tenant

YEARLY = {"kind": "cron", "cron": "0 0 1 1 *"}


async def test_cancelling_a_run_on_the_wire_ends_it_with_the_evidence_of_what_was_sent(
    standing: Replica, receiver: Receiver
) -> None:
    receiver.answer("/", Hang())
    async with new_tenant(standing) as tenant:
        run = await tenant.run_now(await tenant.create("hanging", YEARLY, f"{receiver.url}/hang"))
        await receiver.wait_for(1)
        asked = await tenant.call("POST", f"/v1/runs/{run}/cancel")
        assert (asked["status"], asked["cancel_requested_at"] is not None) == ("running", True)
        ended = await tenant.ended(run)
    assert (ended["status"], ended["reason"]) == ("cancelled", "cancelled")
    [attempt] = ended["attempts"]
    assert (attempt["outcome"], attempt["maybe_delivered"]) == ("abandoned", True)
    assert len(receiver.received) == 1


async def test_a_run_that_nobody_has_claimed_is_cancelled_at_once_and_never_sent(
    fleet: Fleet, receiver: Receiver
) -> None:
    [planning] = await fleet.start("planning", roles="api,planner")
    async with new_tenant(planning) as tenant:
        schedule = await tenant.create("quiet", YEARLY, f"{receiver.url}/never")
        run = await tenant.run_now(schedule)
        cancelled = await tenant.call("POST", f"/v1/runs/{run}/cancel")
        assert (cancelled["status"], cancelled["reason"]) == ("cancelled", "cancelled")
        later = await tenant.run_now(schedule)
        await fleet.start("executing", roles="executor")
        assert (await tenant.ended(later))["status"] == "succeeded"
        assert (await tenant.run(run))["attempts"] == []
    assert [received.run_id for received in receiver.received] == [later]


async def test_deleting_a_schedule_stops_its_run_on_the_wire_and_keeps_the_history(
    standing: Replica, receiver: Receiver
) -> None:
    receiver.answer("/", Hang())
    async with new_tenant(standing) as tenant:
        schedule = await tenant.create("going", YEARLY, f"{receiver.url}/hang")
        run = await tenant.run_now(schedule)
        await receiver.wait_for(1)
        await tenant.call("DELETE", f"/v1/schedules/{schedule}")
        assert (await tenant.client.get(f"/v1/schedules/{schedule}")).status_code == 404
        ended = await tenant.ended(run)
        assert [one["id"] for one in await tenant.runs(schedule)] == [run]
    assert ended["status"] == "cancelled"
    assert [attempt["outcome"] for attempt in ended["attempts"]] == ["abandoned"]
    assert len(receiver.received) == 1


async def test_a_pause_lets_the_run_on_the_wire_finish_and_ends_the_planned_ones_unsent(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/slow", Reply(delay=timedelta(milliseconds=500)))
    [planning] = await fleet.start("planning", roles="api,planner", planner_lookahead="30s")
    async with new_tenant(planning) as tenant:
        moving = await tenant.create("moving", YEARLY, f"{receiver.url}/slow")
        stopped = await tenant.create("stopped", _hourly(seconds=2), f"{receiver.url}/never")
        planned = str((await eventually(lambda: tenant.runs(stopped)))[0]["id"])
        on_the_wire = await tenant.run_now(moving)
        await tenant.call("POST", f"/v1/schedules/{stopped}/pause", {"reason": "holiday"})
        await fleet.start("executing", roles="executor")
        await receiver.wait_for(1)
        await tenant.call("POST", f"/v1/schedules/{moving}/pause")
        assert (await tenant.ended(on_the_wire))["status"] == "succeeded"
        ended = await tenant.ended(planned)
        paused = await tenant.call("GET", f"/v1/schedules/{stopped}")
    assert (ended["status"], ended["reason"], ended["attempts"]) == ("cancelled", "schedule_paused", [])
    assert (paused["status"], paused["status_reason"]) == ("paused", "holiday")
    assert [received.path for received in receiver.received] == ["/slow"]


async def test_an_edit_between_plan_and_fire_is_what_is_sent_and_what_history_shows(
    fleet: Fleet, receiver: Receiver
) -> None:
    [planning] = await fleet.start("planning", roles="api,planner", planner_lookahead="30s")
    async with new_tenant(planning) as tenant:
        schedule = await tenant.create("edited", _once(seconds=2), f"{receiver.url}/old")
        run = str((await eventually(lambda: tenant.runs(schedule)))[0]["id"])
        new: Json = {
            "method": "PUT",
            "url": f"{receiver.url}/new",
            "body": "changed",
            "headers": {"x-mark": "7"},
        }
        changed = await tenant.call("PATCH", f"/v1/schedules/{schedule}", {"target": new})
        assert changed["version"] == 2
        await fleet.start("executing", roles="executor")
        ended = await tenant.ended(run)
    [received] = receiver.received
    assert (received.method, received.path, received.body) == ("PUT", "/new", b"changed")
    assert (received.headers["x-mark"], received.delivery_id) == ("7", ended["delivery_id"])
    [attempt] = ended["attempts"]
    assert (ended["status"], attempt["outcome"], attempt["schedule_version"]) == ("succeeded", "delivered", 2)
    assert (attempt["request"]["method"], attempt["request"]["url"]) == ("PUT", f"{receiver.url}/new")
    assert attempt["request"]["body_bytes"] == len("changed")


async def test_an_edit_while_a_retry_waits_is_seen_by_the_next_attempt(
    standing: Replica, receiver: Receiver
) -> None:
    receiver.answer("/wrong", Reply(status=503))
    async with new_tenant(standing) as tenant:
        schedule = await tenant.create(
            "mended", YEARLY, f"{receiver.url}/wrong", retry={"base_seconds": 2, "cap_seconds": 2}
        )
        run = await tenant.run_now(schedule)
        await eventually(lambda: _has_attempts(tenant.run(run)))
        await tenant.call(
            "PATCH",
            f"/v1/schedules/{schedule}",
            {"target": {"method": "POST", "url": f"{receiver.url}/right"}},
        )
        ended = await tenant.ended(run)
    assert ended["status"] == "succeeded"
    first, *_, last = ended["attempts"]
    assert (first["outcome"], first["schedule_version"], first["status_code"]) == ("rejected", 1, 503)
    assert (last["outcome"], last["schedule_version"], last["status_code"]) == ("delivered", 2, 200)
    assert {received.delivery_id for received in receiver.received} == {ended["delivery_id"]}


async def test_run_now_fires_beside_the_rule_also_when_paused(standing: Replica, receiver: Receiver) -> None:
    async with new_tenant(standing) as tenant:
        schedule = await tenant.create("by hand", YEARLY, f"{receiver.url}/now")
        await tenant.call("POST", f"/v1/schedules/{schedule}/pause")
        runs = [await tenant.run_now(schedule) for _ in range(3)]
        ended = [await tenant.ended(run) for run in runs]
    assert {(run["status"], run["origin"]) for run in ended} == {("succeeded", "manual")}
    assert sorted(received.run_id or "" for received in receiver.received) == sorted(runs)
    assert len({received.delivery_id for received in receiver.received}) == 3


def _once(*, seconds: float) -> Json:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return {"kind": "once", "at": at.isoformat(timespec="milliseconds")}


def _hourly(*, seconds: float) -> Json:
    anchor = datetime.now(UTC) + timedelta(seconds=seconds)
    return {"kind": "every", "every_seconds": 3600, "anchor": anchor.isoformat(timespec="milliseconds")}


async def _has_attempts(run: object) -> bool:
    return bool((await run)["attempts"])  # type: ignore[misc]
