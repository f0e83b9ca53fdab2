"""One request and its answer on a connection of the pool: take it, write, read, give it back.

Of aiohttp this uses the connector and the parser; what lies between them and a `ClientSession` costs more than both.
"""

from __future__ import annotations

from aiohttp.client_proto import ResponseHandler
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from app.domain.outcome import Answer
from app.executor.deliver_answer import as_answer, read_body
from app.executor.deliver_pool import (
    MAX_HEAD_FIELDS,
    MAX_HEAD_LINE,
    BoundedPool,
    StaleConnection,
    is_still_sending,
    is_usable,
)
from app.executor.deliver_request import Origin
from app.executor.flight import DEPARTURE, Departure


async def exchange(
    pool: BoundedPool, origin: Origin, request: bytes, departure: Departure, *, is_head: bool
) -> Answer:
    """Send `request` and read its answer; the connection is given back when it may be used again, else closed.

    Raises what `departure` raises (nothing was sent then), and what aiohttp raises for connections and answers.
    """
    protocol = pool.take(origin)
    if protocol is None:
        protocol = await _dial(pool, origin, departure)
    try:
        _expect_answer(protocol, is_head=is_head)
        departure.depart()
        # All of it at once, whatever its size: it is in memory anyway, and the transport sends it as the peer reads.
        assert protocol.transport is not None
        protocol.transport.write(request)
        message, content = await _final_head(protocol)
        departure.answer()
        body, is_whole = await read_body(message.code, content)
    except BaseException:
        pool.drop(origin, protocol)
        raise
    if is_whole and not is_still_sending(protocol):
        pool.give(origin, protocol)
    else:  # an answer before the request had gone out: the rest of it would stand before the next one
        pool.drop(origin, protocol)
    return as_answer(message.code, message.headers, body, is_whole=is_whole)


async def _dial(pool: BoundedPool, origin: Origin, departure: Departure) -> ResponseHandler:
    """A connection that is open and has not spoken. One that turned out otherwise is replaced once."""
    token = DEPARTURE.set(departure)  # for the resolver and the socket factory
    try:
        for _ in range(2):
            protocol = await pool.dial(origin)
            if is_usable(protocol):
                return protocol
            pool.drop(origin, protocol)
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
