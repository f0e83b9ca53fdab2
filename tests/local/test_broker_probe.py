"""Whether a broker is ready is asked in its own protocol, and nobody else's answer counts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.local.broker_probe import serves_groups

HEAD = b"\0\0\0\1"
"""The number of our request, repeated in front of every answer."""
BROKER = b"\0\0\0\1" + b"\0\0\0\7" + b"\0\1h" + b"\0\0\0\x09" + b"\xff\xff"
NO_BROKER = b"\0\0\0\0"
OURS = b"\0\4ours"
NO_NAME = b"\xff\xff"
READY = b"\0\0" + b"\0\0\0\7" + b"\0\1h" + b"\0\0\0\x09"
NOT_YET = b"\0\x0f" + b"\xff\xff\xff\xff" + b"\0\0" + b"\xff\xff\xff\xff"
"""FindCoordinator's error 15, COORDINATOR_NOT_AVAILABLE."""


def framed(body: bytes) -> bytes:
    return len(HEAD + body).to_bytes(4, "big") + HEAD + body


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A server that gives one answer per request on one connection, then hangs up; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    if not connection.recv(1000):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def is_ready(*answers: bytes) -> bool:
    with answering(*answers) as port:
        return serves_groups("127.0.0.1", port, cluster="ours")


def test_a_broker_of_this_cluster_that_coordinates_groups_is_ready() -> None:
    assert is_ready(framed(BROKER + OURS), framed(READY))


def test_a_broker_without_a_coordinator_is_not_ready_yet() -> None:
    assert not is_ready(framed(BROKER + OURS), framed(NOT_YET))


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(framed(BROKER + b"\0\6theirs"), id="of another cluster"),
        pytest.param(framed(BROKER + NO_NAME), id="of no cluster"),
        pytest.param(framed(NO_BROKER + OURS), id="a cluster without brokers"),
        pytest.param(framed(BROKER), id="an answer that ends too early"),
        pytest.param(framed(b"\x7f\xff\xff\xff"), id="more brokers than the answer holds"),
        pytest.param(framed(BROKER + OURS)[:-1], id="half an answer"),
        pytest.param(b"\x7f\xff\xff\xff", id="an answer longer than any"),
        pytest.param(b"\0\0\0\0", id="an answer of nothing"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="a web server"),
        pytest.param(b"", id="nothing, and a hang-up"),
    ],
)
def test_whoever_else_answers_is_not_the_broker(metadata: bytes) -> None:
    assert not is_ready(metadata)


def test_a_port_where_nobody_listens_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert not serves_groups("127.0.0.1", port, cluster="ours")
