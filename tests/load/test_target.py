"""The target of load runs: what it counts, what it answers, and that it ends with its parent."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.load.arrivals import NO_KEY, key_of
from app.load.ledger import fetch_counts, fetch_ledger, reset_ledger
from app.load.target_connection import ANSWER, REFUSAL, Connection, Desk
from app.local.processes import Child, spawn, stop, wait_for_line
from tests.eventually import eventually
from tests.local.launching import is_running, kill, python, read_line

LONG = timedelta(seconds=60)
IDS = [UUID(int=number) for number in range(1, 6)]

START_AND_WAIT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "app.load.target"], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    options: list[str] = getattr(request, "param", [])
    argv: list[str | Path] = [sys.executable, "-m", "app.load.target", *options]
    started = spawn(argv, env=os.environ, log_path=tmp_path / "log")
    yield started
    stop(started, grace=LONG)


async def port_of(child: Child) -> int:
    said = json.loads("{" + await wait_for_line(child, "{", within=LONG))
    assert said["pid"] == child.pid
    port: int = said["port"]
    return port


async def test_it_counts_every_request_by_its_delivery_id_and_ends_when_told(child: Child) -> None:
    port = await port_of(child)
    begin = time.time_ns()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for delivery_id in (*IDS, IDS[0]):
            async with client.post("/a", headers={"webhook-id": str(delivery_id)}, data=b"{}") as answer:
                assert (answer.status, await answer.read()) == (204, b"")
        async with client.get("/without") as answer:
            assert answer.status == 204
        ledger = await asyncio.to_thread(fetch_ledger, port)
        counts = await asyncio.to_thread(fetch_counts, port)
        assert set(ledger.first) == {delivery_id.bytes for delivery_id in IDS}
        assert (ledger.requests, ledger.distinct, ledger.duplicates, ledger.unidentified) == (7, 5, 1, 1)
        assert all(begin < arrived_ns < time.time_ns() for arrived_ns in ledger.arrivals.times)
        assert (counts["requests"], counts["connections"], counts["unidentified"]) == (7, 1, 1)
        assert counts["cpu_us"] > 0
        await asyncio.to_thread(reset_ledger, port)
        assert (await asyncio.to_thread(fetch_counts, port))["requests"] == 0
        async with client.put("/a", headers={"webhook-id": str(IDS[1])}) as answer:  # the connection lives on
            assert answer.status == 204
    assert (await asyncio.to_thread(fetch_ledger, port)).first.keys() == {IDS[1].bytes}
    assert stop(child, grace=LONG) == 0


@pytest.mark.parametrize("child", [["--hang"]], indirect=True)
async def test_it_can_hang_and_still_counts(child: Child) -> None:
    port = await port_of(child)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request(IDS[0]))
        await eventually(lambda: asyncio.to_thread(lambda: fetch_counts(port)["requests"] == 1))
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)


@pytest.mark.parametrize("child", [["--delay-ms", "80"]], indirect=True)
async def test_it_can_answer_late_and_notes_when_the_request_came(child: Child) -> None:
    port = await port_of(child)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = time.monotonic()
    writer.write(request(IDS[0]) + request(IDS[1], last=True))
    assert await reader.read() == ANSWER * 2  # both, and then the end
    assert time.monotonic() - begin >= 0.078  # timers have whole milliseconds
    writer.close()


async def test_it_ends_with_a_killed_parent_however_it_was_started() -> None:
    with python(START_AND_WAIT) as parent:
        pid = json.loads(read_line(parent))["pid"]
        kill(parent)
        await eventually(lambda: not is_running(pid))


class Wire:
    """Stands for the transport: what was written, and whether it was closed."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def desk() -> Desk:
    return Desk(control=lambda head: b"asked: " + head[:12])


def connect(desk: Desk) -> tuple[Connection, Wire]:
    wire = Wire()
    connection = Connection(desk, asyncio.new_event_loop())
    connection._loop.close()
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire


def request(
    delivery_id: UUID | str, body: bytes = b"", *, chunks: tuple[bytes, ...] = (), last: bool = False
) -> bytes:
    """A request with a body, or with one in chunks."""
    head = f"POST /t/1 HTTP/1.1\r\nHost: x\r\nWebhook-Id:  {delivery_id} \r\n"
    if last:
        head += "Connection: close\r\n"
    if chunks:
        parts = b"".join(b"%x;extension=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\nTrailer: 1\r\n\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


requests = st.one_of(
    st.builds(request, st.uuids(), st.binary(max_size=40)),
    st.builds(request, st.uuids(), chunks=st.lists(st.binary(min_size=1), min_size=1, max_size=3).map(tuple)),
)


@given(sent=st.lists(requests, min_size=1, max_size=6), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_however_the_bytes_are_cut_each_request_is_counted_and_answered_once(
    sent: list[bytes], cuts: list[int]
) -> None:
    desk = Desk(control=bytes)
    connection, wire = connect(desk)
    stream = b"".join(sent)
    places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for begin, end in itertools.pairwise(places):
        if begin < end:
            connection.data_received(stream[begin:end])
    ids = [each.split(b"Webhook-Id:  ")[1].split(b" ")[0] for each in sent]
    assert [bytes(desk.arrivals.keys[place : place + 16]) for place in range(0, 16 * len(ids), 16)] == [
        key_of(each) for each in ids
    ]
    assert len(desk.arrivals) == len(sent)
    assert wire.written == ANSWER * len(sent)
    connection.connection_lost(None)
    assert (desk.incomplete, desk.malformed) == (0, 0)


def test_the_time_is_that_of_the_first_byte(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, _ = connect(desk)
    whole = request(IDS[0], b"1234")
    for second, part in enumerate((whole[:9], whole[9:-2], whole[-2:] + request(IDS[1]))):
        monkeypatch.setattr("app.load.target_connection.time.time_ns", lambda second=second: 1000 + second)
        connection.data_received(part)
    assert list(desk.arrivals.times) == [1000, 1002]


def test_half_a_request_is_no_delivery(desk: Desk) -> None:
    connection, wire = connect(desk)
    connection.data_received(request(IDS[0], b"1234")[:-1])
    connection.connection_lost(None)
    assert (len(desk.arrivals), desk.incomplete, wire.written) == (0, 1, b"")


def test_who_waits_to_be_asked_for_the_body_is_asked(desk: Desk) -> None:
    connection, wire = connect(desk)
    head = f"POST / HTTP/1.1\r\nwebhook-id: {IDS[0]}\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    connection.data_received(head.encode())
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(b"{}")
    assert (len(desk.arrivals), wire.written.endswith(ANSWER)) == (1, True)


@pytest.mark.parametrize(
    "bytes_", [b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"x" * 70_000],
    ids=["no request line", "no length", "an endless head"],
)  # fmt: skip
def test_what_is_no_http_is_refused_and_counted(desk: Desk, bytes_: bytes) -> None:
    connection, wire = connect(desk)
    connection.data_received(request(IDS[0]) + bytes_)
    connection.data_received(request(IDS[1]))  # nothing more is read
    assert (wire.written, wire.is_closed) == (ANSWER + REFUSAL, True)
    assert (len(desk.arrivals), desk.malformed) == (1, 1)


def test_our_own_questions_are_no_deliveries(desk: Desk) -> None:
    connection, wire = connect(desk)
    connection.data_received(b"GET /_count HTTP/1.1\r\nHost: x\r\n\r\n")
    assert wire.written == b"asked: get /_count "
    assert wire.is_closed
    assert (len(desk.arrivals), desk.connections, desk.unidentified) == (0, 0, 0)


def test_a_delivery_id_that_is_no_uuid_has_a_key_of_its_own() -> None:
    one = uuid4()
    assert key_of(str(one).encode()) == one.bytes == key_of(str(one).upper().encode())
    assert key_of(b"") == NO_KEY
    odd = [b"msg_1", b"msg_2", b"z" * 32, b"-" * 36, b"x" * 500]
    assert len({key_of(each) for each in odd} | {NO_KEY}) == 6
    assert all(len(key_of(each)) == 16 for each in odd)
