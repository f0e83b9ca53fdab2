"""Connections that answer early, never read, or speak out of turn: none goes back to the pool in a state that the
next request would suffer from."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial

import pytest
from aiohttp.connector import AddrInfoType

from app.domain.address import WITH_LOOPBACK, AddressPolicy
from app.domain.outcome import Delivered, Rejected, TimedOut, Unreachable
from app.domain.target import MAX_BODY_BYTES, Target
from app.errors import LeaseLost
from app.executor import deliver_pool
from app.executor.deliver import Deliverer, open_session
from app.executor.deliver_pool import is_still_sending
from app.executor.flight import Flight
from app.executor.guard import open_guarded_socket
from tests.eventually import eventually
from tests.executor.targets import Peer, always, answer, answer_ok, serve
from tests.executor.test_deliver import idle_connections, send

ON_BOTH_LOOPS = True

LARGE = "x" * MAX_BODY_BYTES

pytestmark = pytest.mark.usefixtures("no_lost_tasks")


@pytest.fixture
async def deliverer() -> AsyncIterator[Deliverer]:
    opened = open_session(WITH_LOOPBACK, connections=10)
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("method", "data", "is_kept"),
    [
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", True),
        ("GET", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", False),
        ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", False),
        ("GET", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", True),
        ("GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: y\r\n\r\n", True),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", True),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", True),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", True),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", True),
        ("POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", True),
        ("GET", answer() + answer("500 Unasked"), False),
    ],
)
async def test_a_connection_is_kept_when_its_answer_says_so(
    deliverer: Deliverer, method: str, data: bytes, is_kept: bool
) -> None:
    async with serve(always(data)) as at:
        for _ in range(3):
            outcome, _ = await send(deliverer, Target(method, at.url(), (), None))
            assert isinstance(outcome, Delivered | Rejected), outcome
            assert outcome.answer.status != 500
            assert not outcome.answer.truncated
    assert at.connections == (1 if is_kept else 3)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes little of a request before its peer reads."""

    def open_small(info: AddrInfoType, policy: AddressPolicy) -> socket.socket:
        opened = open_guarded_socket(info, policy)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return opened

    monkeypatch.setattr(deliver_pool, "open_guarded_socket", open_small)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("ending", ["stays", "hangs up"])
async def test_an_answer_before_the_body_was_read_counts_and_its_connection_is_not_used_again(
    deliverer: Deliverer, ending: str
) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer("413 Too Large"))
        if ending == "stays":
            await asyncio.Event().wait()

    async with serve(refuse, buffer=4096) as at:
        for _ in range(3):
            outcome, _ = await send(deliverer, Target("POST", at.url(), (), LARGE))
            if ending == "stays":
                assert isinstance(outcome, Rejected), outcome
            else:  # the reset may overtake the answer, as ever
                assert isinstance(outcome, Rejected | Unreachable), outcome
        assert at.connections == 3
        assert idle_connections(deliverer) == []


@pytest.mark.usefixtures("small_buffers")
async def test_a_body_that_is_read_slowly_arrives_whole_and_its_connection_is_kept(
    deliverer: Deliverer,
) -> None:
    flights = [Flight(), Flight()]
    held: list[bool] = []

    async def slow(peer: Peer) -> None:
        for flight in flights:
            await eventually(partial(getattr, flight, "is_sent"))
            held.extend(is_still_sending(protocol) for protocol in deliverer._pool._acquired)
            await peer.request()
            await peer.send(answer())

    async with serve(slow, buffer=4096) as at:
        for flight in flights:
            outcome, _ = await send(deliverer, Target("POST", at.url(), (), LARGE), flight=flight)
            assert isinstance(outcome, Delivered)
    assert held == [True, True]
    assert at.connections == 1
    assert [len(received.body) for received in at.requests] == [MAX_BODY_BYTES] * 2


@pytest.mark.usefixtures("small_buffers")
async def test_a_request_that_nobody_reads_leaves_no_connection_behind_at_the_deadline(
    deliverer: Deliverer,
) -> None:
    """A connection that is closed in peace first sends what it holds: to a peer that never reads, for ever."""

    async def never(peer: Peer) -> None:
        await asyncio.Event().wait()

    async with serve(never, buffer=4096) as at:
        outcome, _ = await send(
            deliverer, Target("POST", at.url(), (), LARGE), deadline=timedelta(milliseconds=200)
        )
        assert isinstance(outcome, TimedOut)
        assert (outcome.phase, outcome.is_maybe_delivered) == ("answer", True)
        await eventually(lambda: deliverer._pool.open_count == 0)


@pytest.mark.parametrize(
    "said", [b"H", b"HTTP/1.1 408 Req", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"]
)
async def test_a_connection_that_spoke_a_little_while_it_was_idle_is_not_used_again(
    deliverer: Deliverer, said: bytes
) -> None:
    """The rest of it would be taken for the beginning of the answer to our request."""
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await peer.send(answer())
            await go.wait()
            await peer.send(said)

    async with serve(script) as at:
        for _ in range(2):
            go.clear()
            outcome, _ = await send(deliverer, Target("GET", at.url(), (), None))
            assert isinstance(outcome, Delivered), outcome
            assert outcome.answer.excerpt == "ok"
            go.set()
            await eventually(lambda: [idle.should_close for idle in idle_connections(deliverer)] == [True])
    assert (at.connections, len(at.requests)) == (2, 2)


async def test_however_many_kept_connections_have_gone_stale_the_request_is_sent(
    deliverer: Deliverer,
) -> None:
    together, go = asyncio.Barrier(4), asyncio.Event()

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if not go.is_set():
                await together.wait()
            await peer.send(answer())
            if not go.is_set():
                await go.wait()
                await peer.send(b"HTTP/1.1 408 Request Time-out\r\n\r\n")

    async with serve(script) as at:
        target = Target("GET", at.url(), (), None)
        outcomes = await asyncio.gather(*(send(deliverer, target) for _ in range(4)))
        assert all(isinstance(outcome, Delivered) for outcome, _ in outcomes)
        assert len(idle_connections(deliverer)) == 4
        go.set()
        await eventually(lambda: [idle.should_close for idle in idle_connections(deliverer)] == [True] * 4)
        outcome, _ = await send(deliverer, target)
        assert isinstance(outcome, Delivered), outcome
        assert len(idle_connections(deliverer)) == 1
    assert at.connections == 5


async def test_the_connection_that_was_used_last_is_used_again(deliverer: Deliverer) -> None:
    """Of those that a burst has opened, the ones that are not needed any more end."""
    together = asyncio.Barrier(3)

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if len(idle_connections(deliverer)) == 0:
                await together.wait()
            await peer.send(answer())

    async with serve(script) as at:
        await asyncio.gather(*(send(deliverer, Target("GET", at.url(), (), None)) for _ in range(3)))
        idle = idle_connections(deliverer)
        assert len(idle) == 3
        for _ in range(2):
            await send(deliverer, Target("GET", at.url(), (), None))
            assert idle_connections(deliverer) == idle  # taken from the end and put back there
    assert at.connections == 3


async def test_a_lease_lost_at_the_last_moment_gives_the_slot_back(deliverer: Deliverer) -> None:
    def refuse() -> None:
        raise LeaseLost

    async with serve(answer_ok) as at:
        for _ in range(20):  # twice as many as there are connections
            with pytest.raises(LeaseLost):
                await send(deliverer, Target("POST", at.url(), (), LARGE), before_send=refuse)
        outcome, _ = await send(deliverer, Target("POST", at.url("/sent"), (), "x"))
        assert isinstance(outcome, Delivered)
    assert [received.line for received in at.requests] == ["POST /sent HTTP/1.1"]


async def test_after_the_end_nothing_is_sent_any_more(deliverer: Deliverer) -> None:
    flight = Flight()
    async with serve(answer_ok) as at:
        await deliverer.close()
        outcome, _ = await send(deliverer, Target("GET", at.url(), (), None), flight=flight)
    assert isinstance(outcome, Unreachable)
    assert (outcome.is_maybe_delivered, flight.is_sent, at.connections) == (False, False, 0)


async def test_a_delivery_in_flight_at_the_end_is_unreachable(deliverer: Deliverer) -> None:
    async def never(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with serve(never) as at:
        attempt = asyncio.create_task(send(deliverer, Target("POST", at.url(), (), "x")))
        await eventually(lambda: len(at.requests) == 1)
        await deliverer.close()
        outcome, _ = await attempt
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("disconnected", True)


@pytest.mark.usefixtures("small_buffers")
async def test_large_requests_cancelled_at_any_turn_leave_nothing_behind(deliverer: Deliverer) -> None:
    """While dialling, writing, waiting, reading; the connections that remain carry the next requests."""
    rng = random.Random(11)
    async with serve(answer_ok, buffer=16_384) as at:
        for _ in range(15):
            tasks = [
                asyncio.create_task(send(deliverer, Target("POST", at.url(), (), LARGE))) for _ in range(15)
            ]
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, 10):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            sent = [result[0] for result in results if not isinstance(result, BaseException)]
            assert len(sent) >= 5
            assert all(isinstance(outcome, Delivered) for outcome in sent)
        assert len(deliverer._pool._acquired) == 0
        assert len(idle_connections(deliverer)) <= 10
        gc.collect()  # on uvloop a connection whose maker was cancelled ends without a word
        await eventually(lambda: deliverer._pool.open_count == len(idle_connections(deliverer)))
