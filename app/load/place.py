"""Where a load run happens: a database, a broker in kafka mode, and the processes that are measured.

What is not given as an address is started here, durable as in production, and everything started ends with us: the
children get the kernel's parent-death signal (`app.local.processes`), the servers stop with their context.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from app.errors import CarillonError
from app.load.cpu import Processes
from app.load.ledger import fetch_counts, reset_ledger
from app.load.refusals import is_loopback, require_disk
from app.load.replica import Replica, is_ready, metric, probe_client
from app.local.broker import EmbeddedBroker
from app.local.postgres import EmbeddedPostgres
from app.local.processes import Child, log_tail, spawn, stop_all, wait_for_line
from app.local.workspace import close_workspace, open_workspace
from app.settings import ClaimMode
from app.store import load_measure, load_seed, migrations
from app.store.pool import Connection, close, connect

READY_WITHIN = timedelta(seconds=60)
STOP_GRACE = timedelta(seconds=40)
"""The drain's own grace, and a little."""
LONG = timedelta(hours=2)
"""The client's patience with one statement of ours: COPY of millions of rows."""

SERVER_SETTINGS: Mapping[str, str] = {
    # Nothing acknowledged is ever lost, as in production; these are PostgreSQL's defaults, stated.
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    # Sizes of a small server of our own; the defaults are for a machine of the nineties.
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
    # pglz saves an eighth of the log and costs planning a seventh more CPU time, which is what two cores lack
    # (docs/load.md).
    "wal_compression": "off",
    # Counts statements, at no CPU time that could be measured.
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track_utility": "off",
    "pg_stat_statements.save": "off",
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person asked for. Addresses that are None are of servers started here.

    `target_url` is a receiver that is there already; one that is not on this machine's loopback has to be owned, see
    `require_owned`. `work_dir` is where the database's files are while it runs (None: the system's temporary folder).
    `settings` are further SCHEDULER_* variables of every replica, `server_settings` further ones of a PostgreSQL
    started here.
    """

    claim_mode: ClaimMode = ClaimMode.POSTGRES
    database_url: str | None = None
    kafka_bootstrap: str | None = None
    target_url: str | None = None
    work_dir: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    server_settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """What receives the deliveries. `port` is that of its ledger, None for a receiver that keeps none; `child` is the
    process when it is ours."""

    url: str
    port: int | None = None
    child: Child | None = None


@dataclass(slots=True)
class Place:
    """The servers of one load run, and the processes started on them so far."""

    wanted: Wanted
    dsn: str
    bootstrap: str | None
    folder: Path
    postgres_pid: int | None
    broker_pid: int | None
    broker_name: str | None
    children: list[Child] = field(default_factory=list)

    @asynccontextmanager
    async def connection(self, name: str = "load", **settings: str) -> AsyncIterator[Connection]:
        """A session of the harness: no time-out of statements, long patience; `settings` are further ones of it."""
        opened = await connect(
            self.dsn,
            application_name=f"carillon {name}",
            settings={"statement_timeout": "0", "idle_in_transaction_session_timeout": "0", **settings},
            command_timeout=LONG,
        )
        try:
            yield opened
        finally:
            await close(opened)

    def launch_replica(self, name: str, part: str, **settings: str) -> Replica:
        """Start a replica with one role; `settings` by name without the prefix. `ready` waits for it."""
        argv = [sys.executable, "-m", "app", "serve", "--roles", part]
        return Replica(name, part, self.launch(name, argv, **settings))

    def launch(self, name: str, argv: Sequence[str], **settings: str) -> Child:
        """Start a process with the settings of this place; its log is `name`.log. Main thread only."""
        environment = {
            **plain_environment(),
            **self.replica_settings(),
            "SCHEDULER_DATABASE_URL": self.dsn,
            "SCHEDULER_REPLICA": name,
            **{f"SCHEDULER_{key.upper()}": value for key, value in settings.items()},
        }
        path = self.folder / f"{name}.log"
        path.unlink(missing_ok=True)  # of an earlier repetition, whose word must not be taken for this one's
        child = spawn(argv, env=environment, log_path=path)
        self.children.append(child)
        return child

    def afresh(self) -> Place:
        """The same place with a topic and a group that nobody has used: no hints, offsets or members of before."""
        name = f"carillon-load-{secrets.token_hex(4)}"
        return self.with_settings(kafka_topic=name, kafka_group=name)

    def in_mode(self, mode: ClaimMode) -> Place:
        """The same place with replicas of that claim mode; one opened in kafka mode has both."""
        wanted = replace(self.wanted, claim_mode=mode)
        if mode is ClaimMode.KAFKA:
            return replace(self, wanted=wanted)
        return replace(self, wanted=wanted, bootstrap=None, broker_pid=None, broker_name=None)

    def with_settings(self, **settings: str) -> Place:
        """The same place, its replicas with further settings; those that the person gave are stronger."""
        ours = {f"SCHEDULER_{name.upper()}": value for name, value in settings.items()}
        return replace(self, wanted=replace(self.wanted, settings={**ours, **self.wanted.settings}))

    def replica_settings(self) -> dict[str, str]:
        """What every replica is given besides its name and the database: stated in the summary."""
        claim = {"SCHEDULER_CLAIM_MODE": self.wanted.claim_mode.value}
        if self.bootstrap is not None:
            claim["SCHEDULER_KAFKA_BOOTSTRAP"] = self.bootstrap
        if self.broker_pid is not None:
            claim["SCHEDULER_KAFKA_IDEMPOTENCE"] = "false"  # the embedded one has no idempotent producers
        return {
            **claim,
            "SCHEDULER_API_PORT": "0",
            "SCHEDULER_EXECUTOR_ALLOW_LOOPBACK_TARGETS": "true",
            **self.wanted.settings,
        }

    async def launch_target(self, *options: str) -> Target:
        """Start a target of our own and wait until it listens, unless one was given."""
        if self.wanted.target_url is not None:
            return await asyncio.to_thread(_given_target, self.wanted.target_url)
        path = self.folder / f"target-{len(self.children)}.log"
        path.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "app.load.target", *options]
        child = spawn(argv, env=plain_environment(), log_path=path)
        self.children.append(child)
        said = json.loads("{" + await wait_for_line(child, "{", within=READY_WITHIN))
        return Target(f"http://127.0.0.1:{said['port']}", said["port"], child)

    async def ready(self, replicas: Sequence[Replica]) -> None:
        """Wait until all say that they are ready and, in kafka mode, until the executors have all partitions.

        Raises CarillonError, with the end of a log, when one does not come up.
        """
        try:
            async with asyncio.timeout(READY_WITHIN.total_seconds()), probe_client() as client:
                while not all([await is_ready(client, replica) for replica in replicas]):
                    self.require_alive()
                    await asyncio.sleep(0.05)
                executors = [replica for replica in replicas if replica.part == "executor"]
                if self.bootstrap is not None and executors:
                    await self._partitions_assigned(client, executors)
        except TimeoutError:
            tails = "\n".join(log_tail(replica.child.log_path) for replica in replicas)
            seconds = READY_WITHIN.total_seconds()
            raise CarillonError(f"the replicas are not ready after {seconds:g} s:\n{tails}") from None

    async def _partitions_assigned(self, client: httpx.AsyncClient, executors: Sequence[Replica]) -> None:
        """Assignment takes seconds after the start: hints before it would be left to the sweep."""
        wanted = int(self.wanted.settings.get("SCHEDULER_KAFKA_PARTITIONS", "12"))
        while True:
            found = [await metric(client, replica, "kafka_partitions") for replica in executors]
            if sum(found) >= wanted and all(found):
                return
            self.require_alive()
            await asyncio.sleep(0.1)

    def require_alive(self) -> None:
        """Raises CarillonError, with the end of its log, when a process of ours has ended."""
        for child in self.children:
            if (code := child.process.poll()) is not None:
                raise CarillonError(f"{child.name} ended with code {code}:\n{log_tail(child.log_path)}")

    def stop(self, children: Sequence[Child] | None = None) -> None:
        """Drain and end these processes, or all; the servers stay."""
        ending = list(self.children if children is None else children)
        stop_all(ending, grace=STOP_GRACE)
        self.children[:] = [child for child in self.children if child not in ending]

    def measured(self, replicas: Sequence[Replica], targets: Sequence[Target] = ()) -> Processes:
        """The processes whose CPU time is read; servers that are not ours cannot be."""
        single: dict[str, tuple[int, ...]] = {}
        for replica in replicas:
            single[replica.part] = (*single.get(replica.part, ()), replica.child.pid)
        if receivers := tuple(target.child.pid for target in targets if target.child is not None):
            single["receiver"] = receivers
        if self.broker_pid is not None:
            single["broker"] = (self.broker_pid,)
        return Processes(single, {} if self.postgres_pid is None else {"postgres": self.postgres_pid})


@contextmanager
def open_servers(wanted: Wanted, say: Say) -> Iterator[Place]:
    """Start what is not given. Blocking, and only from the main thread. Raises ConfigError and CarillonError."""
    with contextlib.ExitStack() as running:
        broker: EmbeddedBroker | None = None
        bootstrap = wanted.kafka_bootstrap
        if wanted.claim_mode is ClaimMode.KAFKA and bootstrap is None:
            say("starting a broker")
            broker = running.enter_context(EmbeddedBroker.start())
            bootstrap = broker.bootstrap
        postgres: EmbeddedPostgres | None = None
        dsn = wanted.database_url
        if dsn is None:
            require_disk(wanted.work_dir)
            say("starting PostgreSQL")
            settings = {**SERVER_SETTINGS, **wanted.server_settings}
            postgres = running.enter_context(
                EmbeddedPostgres.start(settings=settings, temporary_in=wanted.work_dir)
            )
            dsn = postgres.dsn
        workspace = open_workspace()
        running.callback(close_workspace, workspace)
        place = Place(
            wanted,
            dsn,
            bootstrap if wanted.claim_mode is ClaimMode.KAFKA else None,
            workspace.path,
            None if postgres is None else postgres.pid,
            None if broker is None else broker.pid,
            _broker_name(wanted, broker),
        )
        running.callback(place.stop)
        yield place


async def prepare(place: Place) -> None:
    """Bring the schema up to date and empty it. Raises ConfigError for a database with foreign data."""
    await migrations.apply_all(place.dsn)
    async with place.connection() as conn:
        if place.postgres_pid is not None:
            await load_measure.count_statements(conn)
        await load_seed.clear(conn)


def _given_target(url: str) -> Target:
    """A receiver of the person's own; its ledger is used where it is an `app.load.target` on loopback."""
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}"
    if parts.port is not None and is_loopback(parts.hostname or ""):
        # Whatever answers there may be something else altogether.
        with contextlib.suppress(CarillonError, ValueError, TypeError):
            if "requests" in fetch_counts(parts.port):
                reset_ledger(parts.port)
                return Target(base, parts.port)
    return Target(base)


def plain_environment() -> dict[str, str]:
    """Ours without SCHEDULER_*: what is set for another installation must not leak into what is measured."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("SCHEDULER_")}


def _broker_name(wanted: Wanted, broker: EmbeddedBroker | None) -> str | None:
    if wanted.claim_mode is not ClaimMode.KAFKA:
        return None
    return "given" if broker is None else "embedded (Tansu)"
