"""The HTTP engine's connections, with the few things that aiohttp does not offer as settings.

Everything here leans on aiohttp's inner classes; each line of it has a test in tests/executor that fails when
an upgrade takes it away.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, cast
from weakref import WeakSet

import aiohttp
import certifi
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import AddrInfoType
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from app.domain.address import AddressPolicy
from app.executor.deliver_answer import MAX_READ
from app.executor.deliver_request import Origin
from app.executor.guard import GuardedResolver, open_guarded_socket

MAX_RECEIVED = 1024 * 1024
"""Bytes that one answer may cost on the wire, all 1xx answers, heads, chunk framing and trailers included."""

MAX_INFORMATIONAL = 16
"""1xx answers before the final one: each costs the parser some microseconds, and 60,000 of them fit into a MiB."""

MAX_FRAMING = 32 * 1024
"""Bytes of chunk framing and trailers beside the body, at most 6,500 chunks: those of one byte are as dear as 1xx."""

SLICE = 4 * 1024
"""Bytes that are parsed at a time. What they held is counted after each, so a storm costs one slice too many."""

MAX_HEAD_LINE = 8190
MAX_HEAD_FIELDS = 100
IDLE_SECONDS = 4.0
"""How long an unused connection is kept: below the 5 s after which common servers close theirs."""

_NO_LIMITS = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)


class AnswerTooLarge(aiohttp.ClientError):
    """The answer passed `MAX_RECEIVED`, `MAX_INFORMATIONAL` or `MAX_FRAMING`."""


class StaleConnection(aiohttp.ClientError):
    """The connection had spoken or ended before the request was handed to it. Nothing was sent."""


def trusted_tls(ca_file: Path | None = None) -> ssl.SSLContext:
    """TLS 1.2 or later, certificates and names verified against Mozilla's list, and `ca_file` too where
    given.

    Not against whatever `SSL_CERT_FILE` names: what we trust is a setting, not an accident of the
    environment.
    """
    context = ssl.create_default_context(cafile=certifi.where())
    if ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


class BoundedHandler(ResponseHandler):
    """Counts what one answer costs on the wire and in the parser, and cuts it off: endless heads, 1xx answers
    and chunk framing are not data yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: BoundedPool) -> None:
        super().__init__(loop)
        self._pool = pool
        self._received = 0
        self._has_final_head = False
        self._other_heads = 0
        self._framed: StreamReader | None = None
        self._body_size = 0
        self._framing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pool.note_open(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._pool.note_closed(self)
        super().connection_lost(exc)

    def set_response_params(self, **params: Any) -> None:
        self._received = self._other_heads = 0
        self._has_final_head = False
        self._framed = None
        super().set_response_params(**params)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Every head that the parser has found comes through here; 101 is final."""
        code = data[0].code
        is_final = not 100 <= code <= 199 or code == 101
        if self._has_final_head or not is_final:
            self._other_heads += 1  # a second final one is as unasked for as a 1xx
        self._has_final_head |= is_final
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        body = self._payload
        if self._has_final_head and body is not None and body.is_eof():
            if data:  # nobody asked for more: this connection must not carry another request
                self.force_close()
            return
        self._received += len(data)
        if self._received > MAX_RECEIVED:
            self._cut_off(f"the answer is larger than {MAX_RECEIVED} bytes")
            return
        for start in range(0, len(data) or 1, SLICE):  # no data at all means: go on after a pause
            piece = data[start : start + SLICE]
            super().data_received(piece)
            if self._other_heads > MAX_INFORMATIONAL:
                self._cut_off(f"more than {MAX_INFORMATIONAL} informational answers")
            body = self._payload
            if body is not None and not body.is_eof():
                self._check_framing(body, len(piece))
            if self._reading_paused or not self.is_connected():
                self.force_close()  # the reader has more than it wants, or is gone: the rest is dropped
                return

    def _check_framing(self, body: StreamReader, received: int) -> None:
        if body is not self._framed:
            # Its head was in this slice: what else was is not told apart.
            self._framed, self._framing = body, 0
        else:
            self._framing += received - (body.total_bytes - self._body_size)
        self._body_size = body.total_bytes
        if self._framing > MAX_FRAMING:
            if body.total_bytes > MAX_READ:
                self.pause_reading()  # as much as will be read is there; the reader closes the connection
            else:
                self._cut_off(f"more than {MAX_FRAMING} bytes of chunk framing")

    def _cut_off(self, problem: str) -> None:
        error = AnswerTooLarge(problem)
        if self._payload is not None:
            self._payload.set_exception(error)
        self.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


def is_usable(protocol: ResponseHandler) -> bool:
    """Open, and has not spoken out of turn."""
    return protocol.is_connected() and not protocol.should_close


def is_still_sending(protocol: ResponseHandler) -> bool:
    """Some of the request has not left this process yet."""
    transport = protocol.transport
    return protocol.writing_paused or (transport is not None and transport.get_write_buffer_size() > 0)


class BoundedPool(aiohttp.TCPConnector):
    """At most `connections` in use and as many idle. aiohttp bounds only those in use: a burst over many
    hosts would keep every connection of its last seconds open and run the process out of files.
    """

    def __init__(
        self, policy: AddressPolicy, resolver: GuardedResolver, connections: int, tls: ssl.SSLContext
    ):
        super().__init__(
            resolver=resolver,
            use_dns_cache=False,  # the resolver keeps its own, bounded, failures too
            ssl=tls,
            limit=connections,
            limit_per_host=0,
            keepalive_timeout=IDLE_SECONDS,
            socket_factory=self._open_socket,
        )
        # Weak, because uvloop does not tell the end of a connection whose maker was cancelled at its first moment.
        self._open: WeakSet[BoundedHandler] = WeakSet()
        self._policy = policy
        self._connections = connections
        handler = partial(BoundedHandler, loop=asyncio.get_running_loop(), pool=self)
        self._factory = cast("partial[ResponseHandler]", handler)

    @property
    def open_count(self) -> int:
        """Connections in use and idle, for all that is known."""
        return len(self._open)

    def note_open(self, protocol: BoundedHandler) -> None:
        self._open.add(protocol)

    def note_closed(self, protocol: BoundedHandler) -> None:
        self._open.discard(protocol)

    def take(self, origin: Origin) -> ResponseHandler | None:
        """A kept connection to `origin`, in use from now on: `give` or `drop` it. None where none is usable.

        One that spoke or closed while it was idle is closed here. What `connect` does for a kept connection, without
        its coroutines and its object, which cost a tenth of a delivery.
        """
        while idle := self._conns.get(origin.key):
            protocol, kept_at = idle.pop()  # the one used last, so that those which are not needed end
            if not idle:
                del self._conns[origin.key]
            if is_usable(protocol) and monotonic() - kept_at <= IDLE_SECONDS:
                self._acquired.add(protocol)
                return protocol
            protocol.close()
        return None

    async def dial(self, origin: Origin) -> ResponseHandler:
        """A new connection to `origin`, or a kept one where it had to wait for one; `give` or `drop` it.

        Raises what aiohttp raises when there can be none.
        """
        if self.closed:
            raise aiohttp.ClientConnectionError("the pool is closed")
        connection = await self.connect(origin, [], _NO_LIMITS)
        protocol = connection.protocol
        assert protocol is not None
        connection._protocol = None  # it is ours to give back, not that object's
        return protocol

    def give(self, origin: Origin, protocol: ResponseHandler) -> None:
        """Back to the idle ones, or closed when it cannot be used again."""
        self._release(origin.key, protocol)

    def drop(self, origin: Origin, protocol: ResponseHandler) -> None:
        """Close it; at once where it would first have to send what nobody reads."""
        if is_still_sending(protocol):
            protocol.abort()
        self._release(origin.key, protocol, should_close=True)

    def _open_socket(self, info: AddrInfoType) -> socket.socket:
        if self.open_count >= 2 * self._connections:
            self._close_one_idle()
        return open_guarded_socket(info, self._policy)

    def _close_one_idle(self) -> None:
        for key, idle in self._conns.items():
            protocol, _ = idle.popleft()
            if not idle:
                del self._conns[key]
            protocol.close()
            return
