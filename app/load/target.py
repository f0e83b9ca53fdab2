"""The target of load runs, a process of its own: `python -m app.load.target`.

It answers every request with an empty 204 and remembers when which delivery id came, nothing else: so cheap that it
takes little from what is measured beside it on the same machine. It listens on loopback only.

    GET /_count    {"requests": n, "connections": n, "unidentified": n, "incomplete": n, "malformed": n, "cpu_us": n}
    GET /_ledger   the arrivals, in the format of `app.load.arrivals`
    POST /_reset   forget everything so far; 204

The numbers of `/_count` are those since the start or the last reset; `unidentified` are the requests among `requests`
that came without a `webhook-id`, `cpu_us` is the process's whole CPU time in microseconds since its start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

import uvloop

from app.load.target_connection import ANSWER, Connection, Desk
from app.local.processes import end_with_parent

HOST = "127.0.0.1"
BACKLOG = 16_384


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end. Says `{"port": ..., "pid": ...}` on standard output first."""
    parser = argparse.ArgumentParser(
        prog="python -m app.load.target", description="The target of load runs: it counts and answers 204."
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="N", help="answer so much later")
    parser.add_argument("--hang", action="store_true", help="never answer")
    options = parser.parse_args(argv)
    if options.delay_ms < 0:
        parser.error("--delay-ms must not be negative")
    end_with_parent(signal.SIGTERM)
    allow_many_connections()
    uvloop.run(_serve(options.port, delay=None if options.hang else options.delay_ms / 1000))


def allow_many_connections() -> None:
    """Raise our own limit of open files to what the system allows: a connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(port: int, *, delay: float | None) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    desk = Desk(control=lambda head: _control(desk, head), delay=delay)
    server = await loop.create_server(lambda: Connection(desk, loop), HOST, port, backlog=BACKLOG)
    listening = {"port": server.sockets[0].getsockname()[1], "pid": os.getpid()}
    sys.stdout.write(json.dumps(listening) + "\n")
    sys.stdout.flush()
    gc.freeze()  # what is here stays: collections during the run look at connections only
    await stopped.wait()
    server.close()


def _control(desk: Desk, head: bytes) -> bytes:
    """The whole answer to one of our own questions; `head` is in lower case."""
    if head.startswith(b"get /_count "):
        return _answer_with("application/json", json.dumps(_counts(desk)).encode())
    if head.startswith(b"get /_ledger "):
        return _answer_with("application/octet-stream", desk.arrivals.dump())
    desk.arrivals.clear()
    desk.connections = desk.unidentified = desk.incomplete = desk.malformed = 0
    return ANSWER


def _counts(desk: Desk) -> dict[str, int]:
    return {
        "requests": len(desk.arrivals),
        "connections": desk.connections,
        "unidentified": desk.unidentified,
        "incomplete": desk.incomplete,
        "malformed": desk.malformed,
        "cpu_us": time.process_time_ns() // 1000,
    }


def _answer_with(kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    main()
