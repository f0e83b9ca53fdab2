"""Targets that misbehave on purpose: TCP servers whose every byte, pause and reset a test writes itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

Script = Callable[["Peer"], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answer(status: str = "200 OK", headers: str = "", body: bytes = b"ok") -> bytes:
    """A complete answer; `headers` are full lines."""
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came over the wire."""

    line: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> list[str]:
        """All values of a header, by name in any case."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass(slots=True)
class Served:
    """A listening target and what has reached it."""

    host: str
    port: int
    scheme: str
    connections: int = 0
    requests: list[Received] = field(default_factory=list)
    raw: bytearray = field(default_factory=bytearray)

    def url(self, path: str = "/") -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{path}"


class Peer:
    """The server's end of one connection."""

    def __init__(self, served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served = served
        self._reader = reader
        self._writer = writer

    async def head(self) -> bytes | None:
        """Read a request up to its body; None when the client has hung up."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as end:
            self._served.raw += end.partial
            return None
        self._served.raw += head
        return head

    async def request(self) -> Received | None:
        """Read one request to its end; None when the client has hung up."""
        head = await self.head()
        if head is None:
            return None
        line, *lines = head[:-4].decode("latin-1").split("\r\n")
        headers = tuple((name, value.strip()) for name, _, value in (text.partition(":") for text in lines))
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        body = await self._reader.readexactly(length)
        self._served.raw += body
        received = Received(line, headers, body)
        self._served.requests.append(received)
        return received

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_for_ever(self, data: bytes, *, pause: float = 0) -> None:
        """Send `data` again and again until the client hangs up; a pause is the pace, in seconds."""
        while True:
            await self.send(data)
            await asyncio.sleep(pause)

    def reset(self) -> None:
        """End the connection with a RST."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the client has hung up, reading whatever it sends until then."""
        while data := await self._reader.read(65_536):
            self._served.raw += data

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def answer_ok(peer: Peer) -> None:
    """The script of a good target."""
    while await peer.request() is not None:
        await peer.send(OK)


def always(data: bytes) -> Script:
    """The script of a target that answers every request with `data`."""

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await peer.send(data)

    return script


def once(data: bytes) -> Script:
    """The script of a target that answers with `data` and hangs up."""

    async def script(peer: Peer) -> None:
        if await peer.request() is not None:
            await peer.send(data)

    return script


@contextlib.asynccontextmanager
async def serve(
    script: Script, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, buffer: int = 1 << 20
) -> AsyncIterator[Served]:
    """Run `script` on every connection to a free port. A script ends quietly when its client hangs up.

    What it does not ask for is taken from the client up to some multiples of `buffer` bytes.
    """
    served = Served(host=host, port=0, scheme="https" if tls else "http")
    running: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(served, reader, writer)
        try:
            await script(peer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            await peer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        task = asyncio.get_running_loop().create_task(run(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)  # what is accepted later inherits it
    server = await asyncio.start_server(accept, sock=listener, ssl=tls, limit=buffer)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        left = list(running)
        for task in left:
            task.cancel()
        results = await asyncio.gather(*left, return_exceptions=True)
        await server.wait_closed()
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise errors[0]


@contextlib.contextmanager
def refused_port() -> Iterator[int]:
    """A port that refuses connections: bound by us, and not listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
