"""A small, fast HTTP/1.1 server on asyncio's protocols: enough to be the target of any client that speaks it right.

It reads heads and bodies (by length or in chunks), keeps connections alive, and answers requests of one connection
in order. Not a public server: it trusts its clients not to be hostile, but checks that they are well-formed, since
an ill-formed request is a fault of ours to be found.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import assert_never, cast

from app.local.answers import Answer, Cut, Drip, Hang, Reply
from app.local.ledger import Received, echo_of

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024

REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.([01])\Z")
FIELDS = re.compile(
    rb"(?im)^(webhook-id|carillon-run-id|carillon-attempt|content-length|transfer-encoding|expect|connection)"
    rb":[ \t]*([^\r\n]*?)[ \t]*\r?$"
)
"""The only headers anything depends on, found in one pass; the others are read when somebody asks for them."""

CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\Z")

Answering = Callable[[Received], Answer]


class MalformedRequest(Exception):
    """The client did not speak HTTP/1.1."""


class Listener:
    """A listening server; `port` is its port."""

    def __init__(self, server: asyncio.Server, connections: set[Exchange]) -> None:
        self._server = server
        self._connections = connections
        self.port: int = server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection, also those that hang."""
        self._server.close()
        await asyncio.sleep(0)  # connections that were just being accepted are made in this turn
        while self._connections:
            for connection in self._connections:
                connection.drop()
            await asyncio.wait([connection.gone for connection in self._connections])
        await self._server.wait_closed()


async def listen(host: str, port: int, *, answering: Answering) -> Listener:
    """Listen on an address; port 0 takes a free one. `answering` is called once for each complete request.

    Raises OSError when the address is in use.
    """
    connections: set[Exchange] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Exchange(answering, connections), host, port, backlog=1024)
    return Listener(server, connections)


class Exchange(asyncio.Protocol):
    """One connection: its bytes, and the request that is being answered."""

    def __init__(self, answering: Answering, connections: set[Exchange]) -> None:
        self._answering = answering
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answer_open = False
        self._continued = False
        self.gone: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if not self.gone.done():
            self.gone.set_result(None)

    def drop(self) -> None:
        """Close without a good-bye."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._advance()

    def _advance(self) -> None:
        while not self._answer_open and self._buffer and self._transport is not None:
            try:
                request = self._take_request()
            except MalformedRequest as error:
                self._refuse(str(error))
                return
            if request is None:
                return
            received, keep_alive = request
            self._answer_open = True
            self._perform(self._answering(received), received, close=not keep_alive)

    def _take_request(self) -> tuple[Received, bool] | None:
        """The next complete request, taken out of the buffer, and whether the connection stays open after it."""
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD:
                raise MalformedRequest("the head is too long")
            return None
        head = bytes(self._buffer[:end])
        line = REQUEST_LINE.match(head.partition(b"\r\n")[0])
        if line is None:
            raise MalformedRequest("no request line")
        fields = {name.lower(): value for name, value in FIELDS.findall(head)}
        body = self._take_body(fields, end + 4)
        if body is None:
            expects = fields.get(b"expect", b"").lower() == b"100-continue"
            if expects and not self._continued and self._transport is not None:
                self._continued = True
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return None
        self._continued = False
        attempt = fields.get(b"carillon-attempt", b"")
        received = Received(
            delivery_id=_text(fields.get(b"webhook-id")),
            run_id=_text(fields.get(b"carillon-run-id")),
            attempt=int(attempt) if attempt.isdigit() else None,
            method=line[1].decode(),
            path=line[2].decode("latin-1"),
            head=head,
            body=body,
            arrived_ns=time.time_ns(),
            monotonic=time.monotonic(),
        )
        said = fields.get(b"connection", b"").lower()
        return received, b"close" not in said and (line[3] == b"1" or b"keep-alive" in said)

    def _take_body(self, fields: Mapping[bytes, bytes], begin: int) -> bytes | None:
        if b"transfer-encoding" in fields:
            if fields[b"transfer-encoding"].lower() != b"chunked" or b"content-length" in fields:
                raise MalformedRequest("the body's length is not clear")
            return self._take_chunks(begin)
        length = fields.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 10 or int(length) > MAX_BODY:
            raise MalformedRequest("the content-length is not a number, or too great")
        size = int(length)
        if len(self._buffer) < begin + size:
            return None
        body = bytes(self._buffer[begin : begin + size])
        del self._buffer[: begin + size]
        return body

    def _take_chunks(self, begin: int) -> bytes | None:
        parts: list[bytes] = []
        position = begin
        while True:
            end = self._buffer.find(b"\r\n", position)
            if end < 0:
                return None
            size = CHUNK_SIZE.match(bytes(self._buffer[position:end]))
            if size is None:
                raise MalformedRequest("no chunk size")
            length = int(size[1], 16)
            if length == 0:
                trailer_end = self._buffer.find(b"\r\n\r\n", end)
                if trailer_end < 0:
                    return None
                del self._buffer[: trailer_end + 4]
                return b"".join(parts)
            position = end + 2 + length + 2
            if position - begin > MAX_BODY:
                raise MalformedRequest("the body is too long")
            if len(self._buffer) < position:
                return None
            if self._buffer[position - 2 : position] != b"\r\n":
                raise MalformedRequest("a chunk is longer than it says")
            parts.append(bytes(self._buffer[end + 2 : position - 2]))

    def _refuse(self, why: str) -> None:
        self._answer_open = True
        self._send(
            _render(400, f"{why}\n".encode(), (("content-type", "text/plain"),), close=True), close=True
        )

    def _perform(self, answer: Answer, received: Received, *, close: bool) -> None:
        match answer:
            case Reply():
                data = _render_reply(answer, received, close=close)
                if answer.delay:
                    seconds = answer.delay.total_seconds()
                    self._timer = self._loop.call_later(seconds, self._send_and_go_on, data, close)
                else:
                    self._send(data, close=close)
            case Drip():
                if self._transport is not None:
                    self._transport.write(
                        _render(answer.status, answer.body, (), close=True)[: -len(answer.body)]
                    )
                self._drip(answer, 0)
            case Hang():
                pass
            case Cut():
                self._send(answer.sent, close=True)
            case _:
                assert_never(answer)

    def _drip(self, answer: Drip, position: int) -> None:
        if self._transport is None:
            return
        if position == len(answer.body):
            self._transport.close()
            return
        self._transport.write(answer.body[position : position + 1])
        self._timer = self._loop.call_later(answer.every.total_seconds(), self._drip, answer, position + 1)

    def _send_and_go_on(self, data: bytes, close: bool) -> None:  # noqa: FBT001 - call_later passes positions only
        self._send(data, close=close)
        self._advance()

    def _send(self, data: bytes, *, close: bool) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if close:
            self._transport.close()
        else:
            self._answer_open = False


def _render_reply(reply: Reply, received: Received, *, close: bool) -> bytes:
    body = reply.body
    headers = reply.headers
    if body is None:
        body = echo_of(received)
        headers = (("content-type", "application/json"), *headers)
    rendered = _render(reply.status, body, headers, close=close)
    return rendered[: rendered.index(b"\r\n\r\n") + 4] if received.method == "HEAD" else rendered


def _render(status: int, body: bytes, headers: tuple[tuple[str, str], ...], *, close: bool) -> bytes:
    if status < 200 or status in (204, 304):
        return _head(status, headers, None, "close" if close else "keep-alive")
    return _head(status, headers, len(body), "close" if close else "keep-alive") + body


@lru_cache
def _head(status: int, headers: tuple[tuple[str, str], ...], length: int | None, connection: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {_reason(status)}", f"connection: {connection}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"content-length: {length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
