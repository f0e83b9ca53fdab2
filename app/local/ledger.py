"""What a receiver writes down about each request: in memory, or as one JSON line in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Received:
    """One complete request.

    `head` is its head as sent, without the empty line. `arrived_ns` is the wall clock in nanoseconds since 1970 and
    `monotonic` a clock for differences in seconds, both read when the request was complete.
    """

    delivery_id: str | None
    run_id: str | None
    attempt: int | None
    method: str
    path: str
    head: bytes
    body: bytes
    arrived_ns: int
    monotonic: float

    @property
    def headers(self) -> dict[str, str]:
        """The headers by lower-case name; several of one name are joined by a comma."""
        found: dict[str, str] = {}
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            name, _, value = line.partition(":")
            key = name.strip().lower()
            found[key] = f"{found[key]}, {value.strip()}" if key in found else value.strip()
        return found

    @property
    def arrived_at(self) -> datetime:
        """The wall clock at arrival, in UTC, to the microsecond."""
        seconds, rest = divmod(self.arrived_ns, 1_000_000_000)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000)


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One request as the file has it; times and ids as in `Received`, `size` is that of the body in bytes."""

    delivery_id: str | None
    run_id: str | None
    attempt: int | None
    method: str
    path: str
    size: int
    arrived_ns: int


def write_line(descriptor: int, received: Received) -> None:
    """Append one line with one system call: what was written stays when this process is killed."""
    # Put together by hand: json.dumps takes several times as long, and this is once per delivery of a load test.
    line = (
        f'{{"delivery_id":{_quoted(received.delivery_id)},"run_id":{_quoted(received.run_id)}'
        f',"attempt":{"null" if received.attempt is None else received.attempt}'
        f',"method":{_quoted(received.method)},"path":{_quoted(received.path)}'
        f',"size":{len(received.body)},"arrived_ns":{received.arrived_ns}}}\n'
    )
    os.write(descriptor, line.encode())


def echo_of(received: Received) -> bytes:
    """The small JSON that tells the sender what arrived."""
    body = f'{{"method":{_quoted(received.method)},"path":{_quoted(received.path)},"bytes":{len(received.body)}}}'
    return body.encode()


def read_ledger(path: Path) -> Iterator[LedgerLine]:
    """The complete lines of a ledger file, in the order of arrival; a half-written last line is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield LedgerLine(**json.loads(line))


def _quoted(text: str | None) -> str:
    return "null" if text is None else encode_basestring_ascii(text)
