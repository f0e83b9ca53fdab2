"""HTTP/1.1 as bytes: how requests are cut out of a stream, whatever the pieces it arrives in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.local.answers import ECHO, Answer
from app.local.ledger import Received
from app.local.listener import MAX_HEAD, Exchange
from app.local.receiver import Receiver

GET = b"GET /one HTTP/1.1\r\nHost: x\r\n\r\n"
LENGTH = b"POST /two HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\nhello\r\n\r\nyou"
CHUNKS = (
    b"PUT /three HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'5\r\nhello\r\nA;name="v"\r\n\r\n0\r\n\r\nyou\r\n0\r\nTrailer: yes\r\n\r\n'
)
EXPECTED = [
    ("GET", "/one", b""),
    ("POST", "/two", b"hello\r\n\r\nyou"),
    ("PUT", "/three", b"hello\r\n0\r\n\r\nyou"),
]


@dataclass
class Wire:
    """A client's raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> tuple[bytes, bytes]:
        """Status line and body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        return head.split(b"\r\n")[0], await self.reader.readexactly(int(fields[b"content-length"]))


@pytest.fixture
async def wire(receiver: Receiver) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
    yield Wire(reader, writer)
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


@given(cuts=st.lists(st.integers(0, len(GET + LENGTH + CHUNKS)), max_size=12))
async def test_requests_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = GET + LENGTH + CHUNKS
    seen: list[Received] = []

    def take(received: Received) -> Answer:
        seen.append(received)
        return ECHO

    exchange = Exchange(take, set())
    sink = Sink()
    exchange.connection_made(sink)
    edges = [0, *sorted(cuts), len(stream)]
    for begin, end in pairwise(edges):
        if begin != end:
            exchange.data_received(stream[begin:end])
    assert [(received.method, received.path, received.body) for received in seen] == EXPECTED
    assert sink.sent.count(b"HTTP/1.1 200 OK") == 3
    exchange.connection_lost(None)


class Sink(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True


async def test_a_connection_is_kept_for_the_next_request(wire: Wire, receiver: Receiver) -> None:
    for count in (1, 2, 3):
        wire.writer.write(GET)
        assert (await wire.answer())[0] == b"HTTP/1.1 200 OK"
        assert len(receiver.received) == count


@pytest.mark.parametrize(
    "request_head",
    [b"GET / HTTP/1.1\r\nhost: x\r\nConnection: Close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"],
)
async def test_a_connection_is_closed_when_the_client_wants_it(wire: Wire, request_head: bytes) -> None:
    wire.writer.write(request_head)
    everything = await wire.reader.read()
    assert b"connection: close\r\n" in everything
    assert everything.endswith(b'"bytes":0}')


async def test_an_old_client_may_ask_to_keep_the_connection(wire: Wire) -> None:
    for _ in range(2):
        wire.writer.write(b"GET / HTTP/1.0\r\nconnection: Keep-Alive\r\n\r\n")
        assert (await wire.answer())[0] == b"HTTP/1.1 200 OK"


async def test_a_client_that_waits_for_permission_gets_it_once(wire: Wire) -> None:
    wire.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
    assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.writer.write(b"bo")
    await wire.writer.drain()
    wire.writer.write(b"dy")
    status, body = await wire.answer()
    assert status == b"HTTP/1.1 200 OK"
    assert b'"bytes":4' in body


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"hello\r\n\r\n", b"no request line"),
        (b"GET /a b HTTP/1.1\r\n\r\n", b"no request line"),
        (b"GET / HTTP/2.0\r\n\r\n", b"no request line"),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"content-length is not a number"),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999999\r\n\r\n", b"or too great"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", b"length is not clear"),
        (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
            b"length is not clear",
        ),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", b"no chunk size"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n", b"longer than it says"),
        (b"GET / HTTP/1.1\r\n" + b"a" * MAX_HEAD, b"the head is too long"),
    ],
)
async def test_a_request_that_is_not_well_formed_is_refused_and_not_written_down(
    wire: Wire, receiver: Receiver, sent: bytes, complaint: bytes
) -> None:
    wire.writer.write(sent)
    everything = await wire.reader.read()
    assert everything.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert complaint in everything
    assert receiver.received == []
