"""`carillon dev`: everything on this machine with one command, gone with one Ctrl-C.

Starts an embedded PostgreSQL, in kafka mode a broker too, migrates it, starts the echo receiver and the replicas as
children that die with us, makes a demo tenant with a key and two samples over the public API, and says what to try
next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, assert_never

import httpx

from app.errors import CarillonError
from app.local.broker import EmbeddedBroker
from app.local.departure import Departure
from app.local.kept import Kept, recall, remember
from app.local.ports import reserve_port
from app.local.postgres import EmbeddedPostgres
from app.local.processes import Child, log_tail, spawn, stop_all, wait_ended, wait_for_line
from app.local.workspace import close_workspace, open_workspace
from app.settings import ClaimMode
from app.store import migrations

READY_WITHIN = timedelta(seconds=60)
FIRST_RUNS_WITHIN = timedelta(seconds=15)
STOP_GRACE = timedelta(seconds=32)
"""The drain's own grace, and a little."""


@dataclass(frozen=True, slots=True)
class Options:
    """`data_dir` None: a temporary folder that goes with us."""

    port: int
    replicas: int
    data_dir: Path | None
    claim_mode: ClaimMode = ClaimMode.POSTGRES


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo tenant as a person uses it."""

    tenant_id: str
    key: str


def run(options: Options) -> int:
    """Run until Ctrl-C, SIGTERM or the end of a child; the exit code. Main thread only."""
    children: list[Child] = []
    departure = Departure(children)
    departure.listen()
    with contextlib.ExitStack() as stack:
        try:
            broker = _start_broker(options, stack)
            _say("starting PostgreSQL …")
            postgres = stack.enter_context(EmbeddedPostgres.start(options.data_dir))
            workspace = open_workspace()
            stack.callback(close_workspace, workspace)
            stack.callback(lambda: stop_all(children, grace=STOP_GRACE))
            kept = recall(options.data_dir)
            echo_port = _reserve_echo_port(kept, stack)
            place = Place(postgres, broker, workspace.path, _reserve_ports(options, stack), echo_port, kept)
            return asyncio.run(departure.watch(_run(options, place, children)))
        except (KeyboardInterrupt, asyncio.CancelledError, CarillonError):
            # Also whatever the same Ctrl-C has broken: initdb, for one, is in our terminal's foreground.
            if not departure.is_asked:
                raise
            _say("stopping …")
            return 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything is: the servers, the folder of logs, the replicas' ports, the receiver's (0: any free one), and
    what an earlier run has left."""

    postgres: EmbeddedPostgres
    broker: EmbeddedBroker | None
    folder: Path
    ports: Sequence[int]
    echo_port: int
    kept: Kept | None


async def _run(options: Options, place: Place, children: list[Child]) -> int:
    postgres, folder, ports = place.postgres, place.folder, place.ports
    applied = await migrations.apply_all(postgres.dsn)
    _say(f"PostgreSQL {postgres.version} is up, {len(applied)} migrations applied")
    receiver = spawn(
        [sys.executable, "-m", "app.local.receiver", "--port", str(place.echo_port)],
        env=_plain_environment(),
        log_path=folder / "receiver.log",
    )
    children.append(receiver)
    echo = await wait_for_line(receiver, "listening ", within=READY_WITHIN)
    admin_key = (place.kept and place.kept.admin_key) or secrets.token_urlsafe(32)
    for number, port in enumerate(ports, start=1):
        children.append(_spawn_replica(number, port, admin_key, place))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with httpx.AsyncClient(base_url=urls[0], trust_env=False, timeout=10) as client:
        await _all_ready(client, dict(zip(urls, children[1:], strict=True)))
        demo = await _demo(client, admin_key, place.kept)
        # The first port stays on record, even where it was taken this time: older schedules point at it.
        echo_port = (place.kept and place.kept.echo_port) or httpx.URL(echo).port
        remember(options.data_dir, Kept(demo.tenant_id, demo.key, admin_key, echo_port))
        client.headers["authorization"] = f"Bearer {demo.key}"
        since = datetime.now(UTC)
        samples = await _samples(client, echo, since)
        _say("ready")
        print(_what_next(options, place, urls, echo, demo, admin_key, samples), flush=True)
        watching = asyncio.create_task(_report_first_runs(client, samples, since))
        try:
            return await _first_end(children)
        finally:
            watching.cancel()


def _start_broker(options: Options, running: contextlib.ExitStack) -> EmbeddedBroker | None:
    """In kafka mode, started before and stopped after everything that uses it."""
    match options.claim_mode:
        case ClaimMode.POSTGRES:
            return None
        case ClaimMode.KAFKA:
            _say("starting a broker …")
            return running.enter_context(EmbeddedBroker.start())
        case _:
            assert_never(options.claim_mode)


def _claim_settings(broker: EmbeddedBroker | None) -> dict[str, str]:
    if broker is None:
        return {"SCHEDULER_CLAIM_MODE": ClaimMode.POSTGRES}
    return {
        "SCHEDULER_CLAIM_MODE": ClaimMode.KAFKA,
        "SCHEDULER_KAFKA_BOOTSTRAP": broker.bootstrap,
        "SCHEDULER_KAFKA_IDEMPOTENCE": "false",  # the embedded one has no idempotent producers
    }


def _spawn_replica(number: int, port: int, admin_key: str, place: Place) -> Child:
    environment = {
        **_plain_environment(),
        **_claim_settings(place.broker),
        "SCHEDULER_DATABASE_URL": place.postgres.dsn,
        "SCHEDULER_REPLICA": f"dev-{number}",
        "SCHEDULER_API_PORT": str(port),
        "SCHEDULER_API_ADMIN_KEY": admin_key,
        "SCHEDULER_EXECUTOR_ALLOW_LOOPBACK_TARGETS": "true",
        "SCHEDULER_LOG_FORMAT": "text",
    }
    return spawn(
        [sys.executable, "-m", "app", "serve"],
        env=environment,
        log_path=place.folder / f"replica-{number}.log",
    )


async def _all_ready(client: httpx.AsyncClient, replicas: Mapping[str, Child]) -> None:
    """Wait for every replica's /readyz. Raises CarillonError, with the end of a log, when one does not come up."""
    deadline = asyncio.get_running_loop().time() + READY_WITHIN.total_seconds()
    for url, replica in replicas.items():
        # Its own word first: whatever else may have taken its port meanwhile answers too.
        while not (_says_ready(replica) and await _is_ready(client, url)):
            for child in replicas.values():
                if (code := child.process.poll()) is not None:
                    raise CarillonError(f"a replica ended with code {code}:\n{log_tail(child.log_path)}")
            if asyncio.get_running_loop().time() > deadline:
                tails = "\n".join(log_tail(child.log_path) for child in replicas.values())
                raise CarillonError(f"{url} is not ready after {READY_WITHIN.total_seconds():g} s:\n{tails}")
            await asyncio.sleep(0.05)


def _says_ready(replica: Child) -> bool:
    return " replica.ready " in replica.log_path.read_text(encoding="utf-8", errors="replace")


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def _demo(client: httpx.AsyncClient, admin_key: str, kept: Kept | None) -> Demo:
    """The demo tenant: the one of an earlier run where the data was kept, else a new one."""
    if kept is not None:
        return Demo(kept.tenant_id, kept.key)
    client.headers["authorization"] = f"Bearer {admin_key}"
    tenant = await _call(client, "POST", "/v1/tenants", {"name": "demo"})
    key = await _call(
        client, "POST", f"/v1/tenants/{tenant['id']}/keys", {"name": "demo", "scopes": ["read", "write"]}
    )
    return Demo(tenant["id"], key["key"])


async def _samples(client: httpx.AsyncClient, echo: str, now: datetime) -> dict[str, str]:
    """Two schedules that fire at once: an interval of 5 s and a one-off; ids by name. Kept ones are used again: aimed
    at the receiver, the one-off set to fire once more."""
    soon = _written(now + timedelta(seconds=3))
    wanted: dict[str, tuple[dict[str, Any], str]] = {
        "every five seconds": ({"kind": "every", "every_seconds": 5}, "every-5s"),
        "once": ({"kind": "once", "at": soon}, "once"),
    }
    listed = await _call(client, "GET", "/v1/schedules?limit=200", None)
    usable = [schedule for schedule in listed["schedules"] if schedule["status"] in {"active", "finished"}]
    known: dict[str, str] = {schedule["name"]: schedule["id"] for schedule in usable}
    samples: dict[str, str] = {}
    for name, (recurrence, path) in wanted.items():
        target = {"method": "POST", "url": f"{echo}/{path}", "body": json.dumps({"hello": name})}
        body = {"name": name, "recurrence": recurrence, "target": target}
        if name in known:
            await _call(client, "PATCH", f"/v1/schedules/{known[name]}", body)
            samples[name] = known[name]
        else:
            samples[name] = (await _call(client, "POST", "/v1/schedules", body))["id"]
    return samples


async def _report_first_runs(client: httpx.AsyncClient, samples: dict[str, str], since: datetime) -> None:
    """Say when each sample's first run from `since` on has succeeded: the proof that it works."""
    waiting = dict(samples)
    try:
        async with asyncio.timeout(FIRST_RUNS_WITHIN.total_seconds()):
            while waiting:
                for name, schedule_id in list(waiting.items()):
                    query = f"schedule_id={schedule_id}&status=succeeded&from={_written(since)}&limit=1"
                    for run in (await _call(client, "GET", f"/v1/runs?{query}", None))["runs"]:
                        _say(f"delivered: '{name}', planned for {run['scheduled_for']}, run {run['id']}")
                        del waiting[name]
                await asyncio.sleep(0.5)
    except (TimeoutError, CarillonError, httpx.HTTPError):
        names = ", ".join(f"'{name}'" for name in waiting)
        _say(f"not seen to be delivered yet: {names}; GET /v1/runs shows what became of it")


async def _call(client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None) -> Any:
    answer = await client.request(method, path, json=body)
    if answer.is_error:
        raise CarillonError(f"{method} {path} answered {answer.status_code}: {answer.text[:500]}")
    return answer.json()


async def _first_end(children: Sequence[Child]) -> int:
    """Wait until some child ends, which none should: its log says why."""
    waits = {asyncio.create_task(wait_ended(child)): child for child in children}
    done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    ended = waits[done.pop()]
    raise CarillonError(
        f"{ended.name} ended with code {ended.process.returncode}:\n{log_tail(ended.log_path)}"
    )


def _plain_environment() -> dict[str, str]:
    """Ours without SCHEDULER_*: what a developer has set for another installation must not leak in here."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("SCHEDULER_")}


def _reserve_ports(options: Options, held: contextlib.ExitStack) -> list[int]:
    """Replica 1 on the wanted port or, where that is taken, on a free one like the others; ours until `held` closes."""
    ports: list[int] = []
    for wanted in [options.port] + [0] * (options.replicas - 1):
        port = reserve_port(wanted, held)
        if port is None:
            _say(f"port {wanted} is taken, using another")
        while port is None:
            port = reserve_port(0, held)
        ports.append(port)
    return ports


def _reserve_echo_port(kept: Kept | None, held: contextlib.ExitStack) -> int:
    """The receiver's port of an earlier run, which a person's own schedules point at; 0, any free one, without that."""
    if kept is None or kept.echo_port is None:
        return 0
    if reserve_port(kept.echo_port, held) is not None:
        return kept.echo_port
    _say(
        f"port {kept.echo_port}, where the receiver was, is taken: it gets another, and what schedules "
        "of your own send to the old one does not reach it"
    )
    return 0


def _written(instant: datetime) -> str:
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _say(text: str) -> None:
    print(f"carillon dev: {text}", flush=True)


def _what_next(
    options: Options,
    place: Place,
    urls: Sequence[str],
    echo: str,
    demo: Demo,
    admin_key: str,
    samples: dict[str, str],
) -> str:
    others = "".join(f"\n  replica {number}   {url}" for number, url in enumerate(urls[1:], start=2))
    kept = (
        f"kept in {options.data_dir}" if options.data_dir else "gone when you stop (keep it: --data-dir DIR)"
    )
    broker = claims = ""
    if place.broker is not None:
        broker = f"""
  broker      {place.broker.bootstrap}   (Tansu, in memory; it makes no idempotent producers,
              so the replicas run with SCHEDULER_KAFKA_IDEMPOTENCE=false)"""
        claims = "".join(f"{name}={value} " for name, value in _claim_settings(place.broker).items())
    return f"""
  API         {urls[0]}   (documentation: {urls[0]}/docs){others}
  receiver    {echo}   (answers 200 with method, path and size of what it got)
  database    {place.postgres.dsn}{broker}
  logs        {place.folder}/replica-1.log and others beside it, gone when you stop
  data        {kept}

  export CARILLON={urls[0]}
  export KEY={demo.key}
  export ADMIN={admin_key}
  export ECHO={echo}

Try next:
  curl -s $CARILLON/v1/runs -H "Authorization: Bearer $KEY"
  curl -s $CARILLON/v1/schedules -H "Authorization: Bearer $KEY"
  curl -s $CARILLON/v1/schedules -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' \\
    -d '{{"name": "hourly", "recurrence": {{"kind": "cron", "cron": "0 * * * *", "timezone": "Europe/Berlin"}},
         "target": {{"url": "{echo}/hourly"}}}}'
  curl -s -X POST $CARILLON/v1/schedules/{samples["once"]}/run -H "Authorization: Bearer $KEY"
  SCHEDULER_DATABASE_URL={place.postgres.dsn} {claims}carillon doctor

Ctrl-C stops everything.
"""
