"""One request and its answer on a connection of the pool: take it, write, read, give it back.

Of aiohttp this uses the connector and the parser; what lies between them and a `ClientSession` costs more than both.
"""

from __future__ import annotations

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from app.domain.outcome import Answer
from app.executor.deliver_answer import as_answer, read_body
from app.executor.deliver_pool import MAX_HEAD_FIELDS, MAX_HEAD_LINE, BoundedPool, StaleConnection
from app.executor.deliver_request import Origin
from app.executor.flight import DEPARTURE, Departure

_NO_LIMITS = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)


async def exchange(
    pool: BoundedPool, origin: Origin, request: bytes, departure: Departure, *, is_head: bool
) -> Answer:
    """Send `request` and read its answer; the connection is given back when it may be used again, else closed.

    Raises what `departure` raises (nothing was sent then), and what aiohttp raises for connections and answers.
    """
    connection = await _ready_connection(pool, origin, departure)
    try:
        protocol = connection.protocol
        assert protocol is not None
        _expect_answer(protocol, is_head=is_head)
        departure.depart()
        # All of it at once, whatever its size: it is in memory anyway, and the transport sends it as the peer reads.
        assert protocol.transport is not None
        protocol.transport.write(request)
        message, content = await _final_head(protocol)
        departure.answer()
        body, is_whole = await read_body(message.code, content)
    except BaseException:
        _discard(connection)
        raise
    if is_whole and not _is_still_sending(protocol):
        connection.release()
    else:
        _discard(connection)
    return as_answer(message.code, message.headers, body, is_whole=is_whole)


async def _ready_connection(pool: BoundedPool, origin: Origin, departure: Departure) -> Connection:
    """A connection that is open and has not spoken. One that turned out otherwise is replaced once."""
    if pool.closed:
        raise aiohttp.ClientConnectionError("the pool is closed")
    token = DEPARTURE.set(departure)
    try:
        for _ in range(2):
            connection = await pool.connect(origin, [], _NO_LIMITS)
            protocol = connection.protocol
            if protocol is not None and protocol.is_connected() and not protocol.should_close:
                return connection
            connection.close()
    finally:
        DEPARTURE.reset(token)
    raise StaleConnection("the server spoke before it was asked, or hung up")


def _expect_answer(protocol: ResponseHandler, *, is_head: bool) -> None:
    protocol.set_response_params(
        skip_payload=is_head,
        read_until_eof=True,
        auto_decompress=False,
        max_line_size=MAX_HEAD_LINE,
        max_field_size=MAX_HEAD_LINE,
        max_headers=MAX_HEAD_FIELDS,
    )


async def _final_head(protocol: ResponseHandler) -> tuple[RawResponseMessage, StreamReader]:
    """The answer's head; 1xx before it are passed over (101 is final: it ends what HTTP/1.1 can say)."""
    while True:
        message, content = await protocol.read()
        if not 100 <= message.code <= 199 or message.code == 101:
            return message, content


def _is_still_sending(protocol: ResponseHandler) -> bool:
    """The answer came before the request had gone out: the rest of it would stand before the next one."""
    transport = protocol.transport
    return protocol.writing_paused or (transport is not None and transport.get_write_buffer_size() > 0)


def _discard(connection: Connection) -> None:
    """Close it, at once where it would first have to send what nobody reads."""
    protocol = connection.protocol
    if protocol is not None and _is_still_sending(protocol):
        protocol.abort()
    connection.close()
