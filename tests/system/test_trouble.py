"""Bad rows and bad targets among healthy ones: all healthy ones fire, and the bad ones end where everybody sees it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from app.domain import target as targets
from app.domain.ids import ScheduleId, run_id
from app.domain.target import Target
from app.local.answers import Cut, Reply
from app.local.receiver import Receiver
from app.store.partitions import Month, partition_name
from app.store.pool import Connection
from tests.eventually import eventually
from tests.system import evidence
from tests.system.replicas import Fleet
from tests.system.seeding import seed_one_offs, soon

HEALTHY = 200
NUL_BODY = b"\x00before\x00after\xff\xfe\x1b[31m\x00"

_SCHEDULE = """
INSERT INTO schedule (id, tenant_id, name, status, version, recurrence, target, retry, misfire, overlap,
                      expires_after, next_fire_at, created_at, updated_at)
VALUES ($1, gen_random_uuid(), 'bad', 'active', 1, $2::jsonb, $3::jsonb, $4::jsonb, 'fire_all', 'allow', $5, $6,
        now(), now())
"""


async def test_bad_rows_and_targets_cost_no_healthy_schedule_its_run(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    receiver.answer("/nul", Reply(body=NUL_BODY, headers=(("x-odd", "\x7f"), ("content-type", "text/plain"))))
    receiver.answer("/cut", Cut(b"HTTP/1.1 200 OK\r\ncontent-le"))
    url, nul = f"{receiver.url}/fine", f"{receiver.url}/nul"
    spent = await _given_expired_attempt_8(db, url)
    at = await soon(db, ahead=timedelta(seconds=4))
    once = json.dumps({"kind": "once", "at": at.isoformat()})
    unplannable = [
        await _given(db, at, url=url, recurrence='{"kind": "every", "every_seconds": "soon"}'),
        await _given(db, at, url=url, recurrence='{"kind": "once"}'),
        await _given(db, at, url=url, recurrence="[]"),
        await _given(db, at, url=url, recurrence='{"kind": "cron", "cron": "61 * * * *", "timezone": "UTC"}'),
        await _given(
            db, at, url=url, recurrence='{"kind": "cron", "cron": "* * * * *", "timezone": "Mars/Base"}'
        ),
        await _given(db, at, url=url, recurrence=once, retry='{"max_attempts": 99}'),
        await _given(db, at, url=url, recurrence=once, retry="{}"),
    ]
    unsendable = [
        await _given(db, at, url=url, recurrence=once, target='{"url": 5}'),
        await _given(db, at, url=url, recurrence=once, target='"nowhere"'),
    ]
    blocked = await _given(db, at, url="http://169.254.169.254/latest/meta-data", recurrence=once)
    nothing_there = await _given(db, at, url=await _url_of_nobody(), recurrence=once)
    cut_short = await _given(db, at, url=f"{receiver.url}/cut", recurrence=once)
    odd_answer = await _given(db, at, url=nul, recurrence=once)
    await seed_one_offs(db, HEALTHY, url=url, at=at, tenants=7)
    fleet.expect("schedule.quarantined", "order.unusable")
    await fleet.start("one", "two")

    fine = await receiver_saw(receiver, "/fine", HEALTHY)
    assert len(set(fine)) == len(fine) == HEALTHY
    await evidence.all_ended(db, runs=HEALTHY + 7)
    assert await _healthy_statuses(db) == {"succeeded": HEALTHY}

    for schedule in unplannable:
        row = await db.fetchrow("SELECT status, status_reason FROM schedule WHERE id = $1", schedule)
        assert row is not None
        assert row["status"] == "error"
        assert row["status_reason"]
        assert await _runs_of(db, schedule) == []
    assert await _runs_of(db, spent) == [("failed", "attempts_spent", 8)]
    [(outcome, number)] = await _attempts_of(db, spent)
    assert (outcome, number) == ("lease_lost", 8)
    for schedule in unsendable:
        assert [(status, reason) for status, reason, _ in await _runs_of(db, schedule)] == [
            ("failed", "target_unusable")
        ]
    assert await _runs_of(db, blocked) == [("failed", "target_blocked", 1)]
    assert await _attempts_of(db, blocked) == [("blocked", 1)]
    for schedule in (nothing_there, cut_short):
        assert await _runs_of(db, schedule) == [("failed", "attempts_spent", 2)]
        assert await _attempts_of(db, schedule) == [("unreachable", 1), ("unreachable", 2)]
    assert await _runs_of(db, odd_answer) == [("succeeded", None, 1)]
    excerpt: str = await db.fetchval(
        "SELECT response_excerpt FROM run_attempt AS a JOIN job_run AS r ON r.id = a.run_id WHERE r.schedule_id = $1",
        odd_answer,
    )
    assert "before" in excerpt
    assert "after" in excerpt
    assert excerpt.isprintable() or "\ufffd" in excerpt
    assert "\x1b" not in excerpt


async def test_without_any_partition_replicas_make_the_months_and_everything_fires(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    now = await soon(db)
    for month in (Month.of(now), Month.of(now).plus(1)):
        for parent in ("job_run", "run_attempt"):
            await db.execute(f"DROP TABLE {partition_name(parent, month)}")
    await seed_one_offs(db, HEALTHY, url=f"{receiver.url}/fine", at=now, tenants=7)
    far = Month.of(now).plus(1).start + timedelta(days=3)
    await seed_one_offs(db, 1, url=f"{receiver.url}/far", at=far, first_tenant=100)
    fleet.expect("loop.failed", "planner.month_missing")
    await fleet.start("one", "two")
    await receiver.wait_for(HEALTHY)
    await evidence.all_ended(db, runs=HEALTHY)
    assert await evidence.statuses(db) == {"succeeded": HEALTHY}
    assert set(evidence.arrivals(receiver.received).values()) == {1}
    assert await db.fetchval("SELECT to_regclass($1)", partition_name("job_run", Month.of(far))) is not None
    assert [
        tuple(row)
        for row in await db.fetch("SELECT status, next_fire_at FROM schedule WHERE next_fire_at > $1", now)
    ] == [("active", far)]


async def test_occurrences_of_a_month_that_is_gone_are_recorded_and_the_next_ones_fire(
    fleet: Fleet, db: Connection, receiver: Receiver
) -> None:
    now = await soon(db)
    gone = Month.of(now).plus(-2).start + timedelta(days=10)
    day = json.dumps({"kind": "every", "every_seconds": 86_400 * 30, "anchor": gone.isoformat()})
    late = await _given(
        db, gone, url=f"{receiver.url}/late", recurrence=day, expires_after=timedelta(days=30)
    )
    await seed_one_offs(db, HEALTHY, url=f"{receiver.url}/fine", at=now, tenants=7)
    await fleet.start("only")
    await receiver_saw(receiver, "/fine", HEALTHY)

    async def moved_on() -> bool:
        return bool(await db.fetchval("SELECT next_fire_at > now() FROM schedule WHERE id = $1", late))

    await eventually(moved_on)
    recorded = await db.fetch(
        "SELECT first_at, reason FROM disposition WHERE schedule_id = $1 ORDER BY 1", late
    )
    planned = await _runs_of(db, late)
    assert recorded[0]["first_at"] == gone
    assert {row["reason"] for row in recorded} <= {"too_old", "expired"}
    accounted = sum(
        [row[0] for row in await db.fetch("SELECT occurrences FROM disposition WHERE schedule_id = $1", late)]
    )
    due: int = await db.fetchval("SELECT 1 + floor(extract(epoch FROM now() - $1) / (86400 * 30))::int", gone)
    assert accounted + len(planned) == due, "every occurrence has a run or a reason"


async def receiver_saw(receiver: Receiver, path: str, count: int) -> list[str]:
    """Wait until this path was asked for so often; the delivery ids."""

    def found() -> list[str]:
        return [received.delivery_id or "" for received in receiver.received if received.path == path]

    await receiver.wait_until(lambda: len(found()) >= count)
    return found()


async def _given(
    conn: Connection,
    at: datetime,
    *,
    url: str,
    recurrence: str,
    target: str | None = None,
    retry: str = '{"max_attempts": 2, "base_seconds": 1, "factor": 1, "cap_seconds": 1}',
    expires_after: timedelta = timedelta(days=1),
) -> UUID:
    """A schedule of its own tenant, written past everything that would refuse it."""
    schedule = uuid4()
    sent = targets.to_json(Target("POST", url, (), "x")) if target is None else target
    await conn.execute(_SCHEDULE, schedule, recurrence, sent, retry, expires_after, at)
    return schedule


async def _given_expired_attempt_8(conn: Connection, url: str) -> UUID:
    """A run whose eighth and last attempt died with its replica. It stands at the head of the claim order."""
    at = await soon(conn, ahead=-timedelta(seconds=1))
    later = await soon(conn, ahead=timedelta(days=300))
    schedule = await _given(
        conn, later, url=url, recurrence=json.dumps({"kind": "once", "at": later.isoformat()})
    )
    await conn.execute(
        """INSERT INTO job_run (id, scheduled_for, tenant_id, schedule_id, schedule_version, idempotency_key, origin,
                                status, fire_after, attempt, max_attempts, claimed_by, claim_expires_at, expires_at,
                                created_at)
           VALUES ($1, $2, gen_random_uuid(), $3, 1, $1, 'schedule', 'retrying', now() - interval '1 hour', 8, 8,
                   'dead/0/1', now() - interval '1 minute', now() + interval '1 day', now())""",
        run_id(ScheduleId(schedule), at),
        at,
        schedule,
    )
    return schedule


async def _url_of_nobody() -> str:
    """Where somebody was listening a moment ago."""
    gone = await Receiver.start()
    await gone.stop()
    return f"{gone.url}/gone"


async def _healthy_statuses(conn: Connection) -> dict[str, int]:
    rows = await conn.fetch(
        """SELECT r.status, count(*) FROM job_run AS r JOIN schedule AS s ON s.id = r.schedule_id
            WHERE s.name <> 'bad' GROUP BY 1"""
    )
    return {row[0]: row[1] for row in rows}


async def _runs_of(conn: Connection, schedule: UUID) -> list[tuple[str, str | None, int]]:
    rows = await conn.fetch("SELECT status, reason, attempt FROM job_run WHERE schedule_id = $1", schedule)
    return [(row[0], row[1], row[2]) for row in rows]


async def _attempts_of(conn: Connection, schedule: UUID) -> list[tuple[str, int]]:
    rows = await conn.fetch(
        """SELECT a.outcome, a.attempt FROM run_attempt AS a
             JOIN job_run AS r ON r.id = a.run_id AND r.scheduled_for = a.scheduled_for
            WHERE r.schedule_id = $1 ORDER BY a.attempt""",
        schedule,
    )
    return [(row[0], row[1]) for row in rows]
