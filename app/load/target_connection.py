"""One connection of the target: requests are taken apart with as little work as Python allows.

Nothing is kept of a request but its delivery id and the time of its first byte, bodies are dropped as they come.
Requests in a row are answered in a row, all those of one read by one write. For a receiver that keeps and scripts
everything see `app.local.listener`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from app.load.arrivals import NO_KEY, Arrivals, key_of

MAX_HEAD = 64 * 1024
IN_CHUNKS = -1

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\Z")
REQUEST_LINE = re.compile(rb"[a-z]+ \S+ http/1\.[01]\r\n")
CONTROLS = (b"get /_count ", b"get /_ledger ", b"post /_reset ")


class Malformed(Exception):
    """The client did not speak HTTP/1.1."""


@dataclass(slots=True)
class Desk:
    """What all connections of a target share.

    `delay` is in seconds (0: answer at once), None never answers. `connections` are those that have been opened for
    deliveries, `incomplete` the requests whose connection ended in their middle, `malformed` those refused with 400.
    """

    control: Callable[[bytes], bytes]
    delay: float | None = 0.0
    arrivals: Arrivals = field(default_factory=Arrivals)
    connections: int = 0
    unidentified: int = 0
    incomplete: int = 0
    malformed: int = 0


class Chunks:
    """Finds the end of a chunked body, whatever the pieces it comes in."""

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._in_trailer = False

    def skip(self, data: bytes, position: int) -> int | None:
        """Go on at `position`; where the body ends in `data`, or None when it goes on. Raises `Malformed`."""
        while position < len(data):
            if self._left:
                step = min(self._left, len(data) - position)
                self._left -= step
                position += step
                continue
            end = data.find(b"\n", position) + 1
            self._line += data[position : end or len(data)]
            if len(self._line) > MAX_HEAD:
                raise Malformed
            if not end:
                return None
            position = end
            line, self._line = self._line.removesuffix(b"\n").removesuffix(b"\r"), b""
            if self._in_trailer:
                if not line:
                    return position
            else:
                self._begin_chunk(line)
        return None

    def _begin_chunk(self, line: bytes) -> None:
        size = CHUNK_SIZE.match(line)
        if size is None:
            raise Malformed
        self._left = int(size[1], 16)
        if self._left:
            self._left += 2  # the line end behind the chunk
        else:
            self._in_trailer = True


class Connection(asyncio.Protocol):
    """Counts requests at the desk and answers them."""

    def __init__(self, desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
        self._desk = desk
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._begun_ns = 0
        self._key = NO_KEY
        self._body_left = 0
        self._chunks: Chunks | None = None
        self._control = b""
        self._is_last = False
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._desk.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        if self._begun_ns:
            self._desk.incomplete += 1

    def pause_writing(self) -> None:
        """The client does not read its answers: then we do not read its requests."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        now = time.time_ns()
        if self._unread:
            data = self._unread + data
            self._unread = b""
        answers = 0
        position, size = 0, len(data)
        try:
            while position < size and not self._is_over:
                if not self._begun_ns:
                    self._begun_ns = now
                end = self._go_on(data, position)
                if end is None:
                    break
                position = end
                if self._control:
                    self._answer(answers)
                    answers = 0
                    self._answer_control()
                else:
                    self._desk.arrivals.add(self._begun_ns, self._key)
                    answers += 1
                self._begun_ns = 0
                self._is_over = self._is_last
        except Malformed:
            self._refuse(answers)
        else:
            self._answer(answers)

    def _go_on(self, data: bytes, position: int) -> int | None:
        """Read on in the request that is in progress; where it ends in `data`, or None when more has to come."""
        if self._chunks is not None:
            end = self._chunks.skip(data, position)
            if end is not None:
                self._chunks = None
            return end
        if self._body_left:
            body_begin, length = position, self._body_left
        else:
            head_end = data.find(b"\r\n\r\n", position)
            if head_end < 0:
                self._unread = data[position:]
                if len(self._unread) > MAX_HEAD:
                    raise Malformed
                return None
            head = data[position : head_end + 2]
            length = self._read_head(head)
            body_begin = head_end + 4
            if body_begin == len(data) and length:
                self._invite(head)
            if length == IN_CHUNKS:
                self._chunks = Chunks()
                return self._go_on(data, body_begin)
        end = body_begin + length
        self._body_left = end - len(data) if end > len(data) else 0
        return None if self._body_left else end

    def _read_head(self, head: bytes) -> int:
        """Note the delivery id; the length of the body that follows, or `IN_CHUNKS`."""
        lower = head.lower()
        if REQUEST_LINE.match(lower) is None:
            raise Malformed
        begin = lower.find(b"\r\nwebhook-id:")
        if begin >= 0:
            begin += 13
            self._key = key_of(head[begin : head.find(b"\r", begin)].strip())
        else:
            self._key = NO_KEY
            self._control = lower if lower.startswith(CONTROLS) else b""
            if not self._control:
                self._desk.unidentified += 1
        begin = lower.find(b"\r\nconnection:")
        if begin >= 0 and b"close" in lower[begin + 13 : lower.find(b"\r", begin + 13)]:
            self._is_last = True
        return IN_CHUNKS if lower.find(b"\r\ntransfer-encoding:") >= 0 else _content_length(lower)

    def _invite(self, head: bytes) -> None:
        """The body has not come with the head; some clients wait to be asked for it (RFC 9110, 10.1.1)."""
        if self._transport is not None and head.lower().find(b"\r\nexpect: 100-continue\r") >= 0:
            self._transport.write(CONTINUE)

    def _answer(self, count: int) -> None:
        desk, transport = self._desk, self._transport
        if transport is None or desk.delay is None:
            return
        if desk.delay == 0:
            if count:
                transport.write(ANSWER if count == 1 else ANSWER * count)
            if self._is_over:
                transport.close()
        elif count:
            self._loop.call_later(desk.delay, self._answer_late, count)

    def _answer_late(self, count: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(ANSWER * count)
            if self._is_over:
                self._transport.close()

    def _answer_control(self) -> None:
        """A question of ours, not a delivery: neither it nor its connection is counted."""
        if self._transport is not None:
            self._desk.connections -= 1
            self._transport.write(self._desk.control(self._control))
            self._transport.close()
        self._is_last = True

    def _refuse(self, answers: int) -> None:
        self._desk.malformed += 1
        self._begun_ns = 0
        self._is_over = True
        if self._transport is not None:
            self._transport.write(ANSWER * answers + REFUSAL)
            self._transport.close()


def _content_length(lower: bytes) -> int:
    begin = lower.find(b"\r\ncontent-length:")
    if begin < 0:
        return 0
    text = lower[begin + 17 : lower.find(b"\r", begin + 17)].strip()
    if not text.isdigit() or len(text) > 12:
        raise Malformed
    return int(text)
