"""Whether a broker is the one we mean and can serve groups, asked in its own protocol over a plain socket.

A port that accepts connections says too little: the broker may still be starting, or be somebody else's.
Two requests, both in versions that every broker of the last years speaks (kafka.apache.org/protocol):

    Metadata 2, for no topic      which cluster this is, and that it has a broker
    FindCoordinator 0             that a group can be joined; Apache Kafka makes its offsets topic on the way
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from datetime import timedelta

METADATA = 3
FIND_COORDINATOR = 10
LONGEST = 1024 * 1024
CALL_WITHIN = timedelta(seconds=2)


def serves_groups(host: str, port: int, *, cluster: str) -> bool:
    """Whether the broker there belongs to this cluster and coordinates groups by now.

    Takes at most some seconds; whatever goes wrong on the way means "not yet".
    """
    try:
        with socket.create_connection((host, port), CALL_WITHIN.total_seconds()) as connection:
            if _read_cluster(_ask(connection, METADATA, 2, struct.pack(">i", 0))) != cluster:
                return False
            return _ask(connection, FIND_COORDINATOR, 0, _text(b"probe")).integer(">h") == 0
    except (OSError, _NotKafka):
        return False


class _NotKafka(Exception):
    """The answer is not one of a Kafka broker."""


@dataclass(slots=True)
class _Answer:
    """The bytes of an answer, read from front to back."""

    body: bytes
    place: int = 0

    def integer(self, form: str) -> int:
        """The next number; `form` is that of struct."""
        try:
            (value,) = struct.unpack_from(form, self.body, self.place)
        except struct.error as error:
            raise _NotKafka from error
        self.place += struct.calcsize(form)
        return int(value)

    def text(self) -> str | None:
        """The next text, which may be none at all."""
        length = self.integer(">h")
        if length < 0:
            return None
        self.place += length
        return self.body[self.place - length : self.place].decode(errors="replace")


def _ask(connection: socket.socket, key: int, version: int, body: bytes) -> _Answer:
    request = struct.pack(">hhi", key, version, 1) + _text(b"carillon") + body
    connection.sendall(struct.pack(">i", len(request)) + request)
    length = _Answer(_receive(connection, 4)).integer(">i")
    if not 4 <= length <= LONGEST:
        raise _NotKafka
    return _Answer(_receive(connection, length), place=4)  # the first four repeat our number


def _read_cluster(answer: _Answer) -> str | None:
    """The cluster's id out of Metadata 2, once it has a broker."""
    brokers = answer.integer(">i")
    for _ in range(brokers):
        answer.integer(">i")  # id
        answer.text()  # host
        answer.integer(">i")  # port
        answer.text()  # rack
    return answer.text() if brokers > 0 else None


def _receive(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise _NotKafka
        received += part
    return received


def _text(value: bytes) -> bytes:
    return struct.pack(">h", len(value)) + value
