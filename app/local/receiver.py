"""The target of development, load and tests: a real HTTP server that writes down what it gets.

In a process of its own it is `python -m app.local.receiver --ledger FILE`; see `main`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

import uvloop

from app.local.answers import Answer, Hang, Reply, Script
from app.local.ledger import Received, write_line
from app.local.listener import Listener, listen
from app.local.processes import end_with_parent

HOST = "127.0.0.1"
WAIT_LIMIT = timedelta(seconds=20)


class Receiver:
    """A receiver in this process. Any method and path is answered with 200, unless `script` says otherwise.

    `received` is the ledger, in the order of arrival; all of it stays in memory until `clear`.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.script = Script()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._host = HOST
        self._port = 0
        self._listener: Listener | None = None

    @classmethod
    async def start(cls, *, host: str = HOST, port: int = 0) -> Self:
        """Listen, on a free port by default. Raises OSError when the port is in use."""
        receiver = cls()
        receiver._host, receiver._port = host, port
        await receiver.resume()
        return receiver

    @property
    def url(self) -> str:
        """The address without a path, such as `http://127.0.0.1:40001`."""
        return f"http://{self._host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def stop(self) -> None:
        """Stop listening and drop all connections. The ledger stays; a second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    async def resume(self) -> None:
        """Listen again on the same port after `stop`, like a target that comes back."""
        if self._listener is None:
            self._listener = await listen(self._host, self._port, answering=self._take)
            self._port = self._listener.port

    def answer(self, prefix: str, *answers: Answer) -> None:
        """Answer requests whose path begins with `prefix` with these in turn, the last one for ever after."""
        self.script.answer(prefix, *answers)

    def answer_each(self, prefix: str, *answers: Answer) -> None:
        """The same, counted for each delivery id by itself: each fails first and succeeds then, say."""
        self.script.answer_each(prefix, *answers)

    def counts(self) -> Counter[str]:
        """How often each delivery id arrived; requests without one are counted under an empty id."""
        return Counter(received.delivery_id or "" for received in self.received)

    def clear(self) -> None:
        """Forget what has arrived, not the answers."""
        self.received.clear()

    async def wait_for(self, count: int, *, timeout: timedelta = WAIT_LIMIT) -> list[Received]:
        """The ledger, once it has at least `count` requests. Raises TimeoutError that says how many there were."""
        try:
            await self.wait_until(lambda: len(self.received) >= count, timeout=timeout)
        except TimeoutError:
            seconds = timeout.total_seconds()
            raise TimeoutError(f"{len(self.received)} of {count} requests arrived in {seconds:g} s") from None
        return list(self.received)

    async def wait_until(self, holds: Callable[[], bool], *, timeout: timedelta = WAIT_LIMIT) -> None:
        """Wait until `holds`, which is asked now and after each arrival. Raises TimeoutError."""
        if holds():
            return
        waiter = (holds, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def _take(self, received: Received) -> Answer:
        self.received.append(received)
        for holds, waiter in self._waiters:
            if not waiter.done() and holds():
                waiter.set_result(None)
        return self.script.choose(received)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve in a process of its own until SIGTERM, SIGINT or the parent's end.

    Says `listening http://HOST:PORT` on standard output when it does. Each request becomes a line of the ledger file,
    in the moment of its arrival; nothing is kept in memory.
    """
    parser = argparse.ArgumentParser(
        prog="python -m app.local.receiver", description="An HTTP server that echoes."
    )
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--ledger", type=Path, help="append one JSON line for each request to this file")
    parser.add_argument(
        "--answer",
        action="append",
        default=[],
        type=parse_answer,
        metavar="PREFIX=STATUS[,STATUS…][@MILLISECONDS]|hang",
        help="statuses in turn for each delivery id below this path, each after a delay; may be given often",
    )
    options = parser.parse_args(argv)
    end_with_parent(signal.SIGTERM)
    script = Script()
    for prefix, answers in options.answer:
        script.answer_each(prefix, *answers)
    with contextlib.ExitStack() as stack:
        ledger: int | None = None
        if options.ledger is not None:
            ledger = os.open(options.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, ledger)
        uvloop.run(_serve(options.host, options.port, ledger=ledger, script=script))


def parse_answer(text: str) -> tuple[str, tuple[Answer, ...]]:
    """Read `/flaky=503,200@250` or `/dead=hang`. Raises `argparse.ArgumentTypeError`."""
    prefix, separator, wanted = text.rpartition("=")
    statuses, _, delay = wanted.partition("@")
    if not separator or not prefix.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not /PREFIX=ANSWER")
    if wanted == "hang":
        return prefix, (Hang(),)
    try:
        after = timedelta(milliseconds=float(delay or 0))
        return prefix, tuple(Reply(status=_status(status), delay=after) for status in statuses.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; allowed are 200 to 599, or hang") from None


def _status(text: str) -> int:
    status = int(text)
    if not 200 <= status <= 599:
        raise ValueError(f"status {status}")
    return status


async def _serve(host: str, port: int, *, ledger: int | None, script: Script) -> None:
    def take(received: Received) -> Answer:
        if ledger is not None:
            write_line(ledger, received)
        return script.choose(received)

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    listener = await listen(host, port, answering=take)
    print(f"listening http://{host}:{listener.port}", flush=True)
    await stopped.wait()
    await listener.close()


if __name__ == "__main__":
    main()
