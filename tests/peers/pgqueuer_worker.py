"""PGQueuer at work, in an environment of its own: a program that `tests.peers` starts, and no part of Carillon.

    prepare DSN JOBS SEED     tables, recommended autovacuum settings, JOBS jobs with known ids
    drain DSN OPTIONS         says {"ready": true}, waits for a line, empties the queue, says {"begun": …, "done": …}
    result DSN                says what the tables know: jobs left, jobs logged as successful, when the last one was

One JSON object per line on standard output. Instants are the database's, in seconds since 1970.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import sys
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import asyncpg  # type: ignore[import-untyped,unused-ignore]
import uvloop
from pgqueuer.core.qm import QueueManager  # type: ignore[import-not-found]
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]
from pgqueuer.types import QueueExecutionMode  # type: ignore[import-not-found]

ENTRYPOINT = "deliver"
ENQUEUED_AT_ONCE = 10_000
BODY = b'{"event":"tick","sequence":1}'

COLLECT_AFTER = (50_000, 50, 100)
"""Thresholds of Python's garbage collector: at its default it walks through all waiting tasks again and again."""

Handler = Callable[[Any], Coroutine[Any, Any, None]]


async def prepare(dsn: str, jobs: int, seed: int) -> None:
    """Fill a fresh database. The n-th job's id is the n-th number of that seed, so that the parent knows them too."""
    rng = random.Random(seed)
    connection = await asyncpg.connect(dsn)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    for begin in range(0, jobs, ENQUEUED_AT_ONCE):
        count = min(ENQUEUED_AT_ONCE, jobs - begin)
        ids = [str(uuid.UUID(int=rng.getrandbits(128))).encode() for _ in range(count)]
        await queries.enqueue([ENTRYPOINT] * count, ids, [0] * count)
    await connection.execute("VACUUM ANALYZE")
    await connection.execute("CHECKPOINT")
    await connection.close()
    say({"prepared": jobs})


async def drain(
    dsn: str, *, batch_size: int, max_concurrent: int | None, managers: int, pool: int, url: str, limit: int
) -> None:
    """Empty the queue with so many queue managers in this process; `url` empty: jobs that do nothing."""
    async with contextlib.AsyncExitStack() as stack:
        handler = await _handler(stack, url, limit)
        working = [await _manager(stack, dsn, pool, handler) for _ in range(managers)]
        clock = await asyncpg.connect(dsn)
        stack.push_async_callback(clock.close)
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        say({"ready": True})
        await asyncio.to_thread(sys.stdin.readline)
        begun = await clock.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
        await asyncio.gather(
            *(
                manager.run(
                    batch_size=batch_size,
                    mode=QueueExecutionMode.drain,
                    max_concurrent_tasks=max_concurrent,
                )
                for manager in working
            )
        )
        done = await clock.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
        say({"begun": begun, "done": done})
        await asyncio.to_thread(sys.stdin.readline)  # our CPU time is read before we go


async def _manager(stack: contextlib.AsyncExitStack, dsn: str, pool: int, handler: Handler) -> QueueManager:
    """A queue manager on one connection (`pool` 0) or on a pool of that many."""
    if pool:
        connections = await asyncpg.create_pool(dsn, min_size=pool, max_size=pool)
        stack.push_async_callback(connections.close)
        driver = AsyncpgPoolDriver(connections)
    else:
        connection = await asyncpg.connect(dsn)
        stack.push_async_callback(connection.close)
        driver = AsyncpgDriver(connection)
    manager = QueueManager(Queries(driver))
    manager.entrypoint(ENTRYPOINT)(handler)
    return manager


async def _handler(stack: contextlib.AsyncExitStack, url: str, limit: int) -> Handler:
    if not url:

        async def nothing(_job: Any) -> None:
            pass

        return nothing
    connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=60)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=30),
        )
    )

    async def deliver(job: Any) -> None:
        headers = {"webhook-id": job.payload.decode(), "content-type": "application/json"}
        async with session.post(url, data=BODY, headers=headers) as answer:
            await answer.read()
            answer.raise_for_status()

    return deliver


async def result(dsn: str) -> None:
    """What is durable: a job that is done has left the queue table and has a row in the log, by one statement."""
    connection = await asyncpg.connect(dsn)
    left = await connection.fetchval("SELECT count(*) FROM pgqueuer")
    row = await connection.fetchrow(
        "SELECT count(*) AS logged, count(DISTINCT job_id) AS distinct,"
        " extract(epoch FROM max(created))::float8 AS last FROM pgqueuer_log WHERE status = 'successful'"
    )
    await connection.close()
    assert row is not None
    say({"left": left, **row})


def say(content: dict[str, Any]) -> None:
    """One line for the parent."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main(command: str, dsn: str, *arguments: str) -> None:
    """Run one command; see this module's docstring."""
    if command == "prepare":
        uvloop.run(prepare(dsn, int(arguments[0]), int(arguments[1])))
    elif command == "drain":
        uvloop.run(drain(dsn, **json.loads(arguments[0])))
    elif command == "result":
        uvloop.run(result(dsn))
    else:
        raise SystemExit(f"{command} is no command of this program")


if __name__ == "__main__":
    main(*sys.argv[1:])
