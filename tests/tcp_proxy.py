"""A TCP proxy between a pool and its server that can lose answers, cut connections and refuse new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit


class TcpProxy:
    """One address in front of another. Made by `tcp_proxy`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_away = False
        """New connections are closed at once."""
        self.losing = asyncio.Event()
        """While set, the next answer is not passed on; its connection is cut instead, and this is cleared."""
        self.lost = 0
        """How many answers were lost."""
        self.refused = 0
        """How many connections were not taken."""

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection that is open now."""
        for writer in list(self._open):
            writer.transport.abort()

    def go_away(self) -> None:
        """Break every connection and take no new ones until `come_back`."""
        self.is_away = True
        self.cut()

    def come_back(self) -> None:
        self.is_away = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.is_away:
            self.refused += 1
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            there, away = await asyncio.open_connection(*self._target)
            self._open |= {writer, away}
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(reader, away, answers=False))
                    group.create_task(self._pass_on(there, writer, answers=True))
            finally:
                for end in (writer, away):
                    end.transport.abort()
                    self._open.discard(end)

    async def _pass_on(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        """Until either end is gone; then both are."""
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if answers and self.losing.is_set():
                    self.losing.clear()
                    self.lost += 1
                    self.cut()
                    return
                to.write(data)
                await to.drain()
        to.transport.abort()


@asynccontextmanager
async def tcp_proxy(dsn: str) -> AsyncIterator[tuple[TcpProxy, str]]:
    """A proxy in front of the server of `dsn`, and the address of the same database through it."""
    parts = urlsplit(dsn)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = TcpProxy(parts.hostname, parts.port)
    await proxy.start()
    user = f"{parts.username}:{parts.password}@" if parts.password else f"{parts.username}@"
    try:
        yield proxy, urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{proxy.port}"))
    finally:
        await proxy.stop()
