"""Targets that break, stall or flood at every phase: a named outcome each, in time, and with bounded
memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import random
import socket
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from aiohttp.client_proto import ResponseHandler

from app.domain.address import WITH_LOOPBACK
from app.domain.outcome import Delivered, Outcome, Rejected, TimedOut, Unreachable
from app.domain.target import Target
from app.executor import deliver_pool
from app.executor.deadline import Deadlines
from app.executor.deliver import Deliverer, open_session
from app.executor.deliver_answer import MAX_EXCERPT, excerpt_of
from app.executor.deliver_pool import MAX_FRAMING, MAX_RECEIVED, SLICE
from app.executor.flight import Flight
from tests.eventually import eventually
from tests.executor.targets import Peer, Script, always, answer, answer_ok, once, serve

ON_BOTH_LOOPS = True

AMPLE = timedelta(seconds=30)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def deliverer() -> AsyncIterator[Deliverer]:
    opened = open_session(WITH_LOOPBACK, connections=10)
    yield opened
    await opened.close()


async def post(
    deliverer: Deliverer,
    url: str,
    *,
    deadline: timedelta = AMPLE,
    body: str = "x",
    flight: Flight | None = None,
) -> Outcome:
    outcome, _ = await deliverer.deliver(
        Target("POST", url, (), body),
        headers=(),
        deadline=deadline,
        before_send=lambda: None,
        flight=flight or Flight(),
    )
    return outcome


def reset_after(data: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        peer.reset()

    return script


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "disconnected"),
        (b"HTTP/1.", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "disconnected"),
        (CHUNKED + b"4\r\nhalf\r\n", "disconnected"),
        (CHUNKED + b"4\r\nhalf\r\n0\r\n", "disconnected"),
    ],
)
@pytest.mark.parametrize("ending", ["FIN", "RST"])
async def test_an_answer_that_ends_early_is_unreachable_and_maybe_delivered(
    deliverer: Deliverer, sent: bytes, error: str, ending: str
) -> None:
    async with serve(once(sent) if ending == "FIN" else reset_after(sent)) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == (error, True)
    assert len(at.requests) == 1


async def test_a_connection_that_is_accepted_and_closed_at_once_is_unreachable(deliverer: Deliverer) -> None:
    async def script(peer: Peer) -> None:
        peer.reset()

    async with serve(script) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable)


async def test_an_answer_without_a_length_ends_with_the_connection(deliverer: Deliverer) -> None:
    async with serve(once(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Delivered)
    assert (outcome.answer.excerpt, outcome.answer.truncated) == ("until the end", False)


@pytest.mark.parametrize(
    "data",
    [
        b"<html>HTTP/0.9</html>\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 OK 200\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 -200 OK\r\n\r\n",
        b"HTTP/1.1 \xb2\xb0\xb0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: no name\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
    ],
)
async def test_what_is_not_http_is_unreachable_by_protocol(deliverer: Deliverer, data: bytes) -> None:
    async with serve(once(data)) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("protocol", True)


async def test_a_server_that_speaks_first_gets_no_request(deliverer: Deliverer) -> None:
    """SMTP, SSH and FTP greet; a request in their face would be an attack that our tenants send with our
    address."""

    async def script(peer: Peer) -> None:
        await peer.send(b"220 mail.example ESMTP\r\n")
        await peer.gone()

    flight = Flight()
    async with serve(script) as at:
        await wait_for_greeting(deliverer)
        outcome = await post(deliverer, at.url(), flight=flight)
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered, flight.is_sent) == ("protocol", False, False)
    assert bytes(at.raw) == b""


async def wait_for_greeting(deliverer: Deliverer) -> None:
    """Let every new connection wait for the server's first word before it counts as made."""
    connect = deliverer._pool._create_connection

    async def patient(*args: object) -> object:
        protocol = await connect(*args)  # type: ignore[arg-type]
        await eventually(lambda: protocol.should_close or bool(protocol._tail))
        return protocol

    deliverer._pool._create_connection = patient  # type: ignore[method-assign,assignment]


class Hourglass:
    """A clock for deadlines that stands still until the test lets it run out."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run_out(self) -> None:
        self.now += 1e9


@pytest.fixture
async def hourglass(deliverer: Deliverer) -> Hourglass:
    clock = Hourglass()
    deliverer._deadlines = Deadlines(clock)
    return clock


def drip(before: bytes, drop: bytes, drops: list[bytes]) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(before)
        while True:
            await peer.send(drop)
            drops.append(drop)
            await asyncio.sleep(0.005)

    return script


@pytest.mark.parametrize(
    ("before", "drop", "phase"),
    [
        (b"", b"", "answer"),
        (b"HTTP/1.1 200 ", b"O", "answer"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y", "answer"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", "answer"),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 16 + b"HTTP/1.1 200 ", b"O", "answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"y", "body"),
        (CHUNKED, b"1\r\ny\r\n", "body"),
        (CHUNKED + b"1;ext=", b"y", "body"),
        (CHUNKED + b"0\r\n", b"Trailer: y\r\n", "body"),
    ],
)
async def test_a_dripping_answer_ends_at_the_deadline(
    deliverer: Deliverer, hourglass: Hourglass, before: bytes, drop: bytes, phase: str
) -> None:
    flight = Flight()
    drops: list[bytes] = []
    async with serve(drip(before, drop, drops)) as at:
        attempt = asyncio.create_task(post(deliverer, at.url(), flight=flight))
        await eventually(lambda: flight.phase == phase and len(drops) > 10)
        hourglass.run_out()
        outcome = await attempt
    assert isinstance(outcome, TimedOut), outcome
    assert (outcome.phase, outcome.is_maybe_delivered) == (phase, True)


async def test_a_target_that_never_reads_ends_at_the_deadline(
    deliverer: Deliverer, hourglass: Hourglass
) -> None:
    async def script(peer: Peer) -> None:
        await asyncio.Event().wait()

    flight = Flight()
    async with serve(script) as at:
        attempt = asyncio.create_task(post(deliverer, at.url(), body="x" * 256 * 1024, flight=flight))
        await eventually(lambda: flight.is_sent)
        hourglass.run_out()
        outcome = await attempt
    assert isinstance(outcome, TimedOut)
    assert (outcome.phase, outcome.is_maybe_delivered) == ("answer", True)


async def test_a_connection_that_is_not_accepted_ends_at_the_deadline(deliverer: Deliverer) -> None:
    """A full backlog drops our SYN, as a black hole does."""
    with socket.socket() as listener, contextlib.ExitStack() as fillers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        outcome = await post(deliverer, url, deadline=timedelta(milliseconds=100))
    assert isinstance(outcome, TimedOut)
    assert (outcome.phase, outcome.is_maybe_delivered) == ("connect", False)


def flood(before: bytes, data: bytes, ended: asyncio.Event) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        try:
            await peer.send(before)
            await peer.send_for_ever(data)
        finally:
            ended.set()

    return script


@pytest.mark.parametrize(
    ("before", "data", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-Filler: " + b"y" * 100 + b"\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 10_000, "too_large"),
        (b"HTTP/1.1 200 ", b"y" * 10_000, "too_large"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 100, "too_large"),
    ],
)
async def test_an_endless_head_is_cut_off(
    deliverer: Deliverer, before: bytes, data: bytes, error: str
) -> None:
    ended = asyncio.Event()
    async with serve(flood(before, data, ended)) as at:
        outcome = await post(deliverer, at.url())
        await ended.wait()
    assert isinstance(outcome, Unreachable), outcome
    assert (outcome.error, outcome.is_maybe_delivered) == (error, True)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the parser was given."""
    sizes: list[int] = []
    real = ResponseHandler.data_received

    def watched(handler: ResponseHandler, data: bytes) -> None:
        sizes.append(len(data))
        real(handler, data)

    monkeypatch.setattr(ResponseHandler, "data_received", watched)
    return sizes


def storm_on_a_kept_connection(pieces: list[bytes]) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        for piece in pieces:
            await peer.send(piece)
        await peer.request()

    return script


@pytest.mark.parametrize(
    "one",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 102 \r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
        b"HTTP/1.1 199 \r\n\r\n",
    ],
)
@pytest.mark.parametrize("size", [7, 1000, 1_000_000])
async def test_a_storm_of_informational_answers_is_cut_off_after_one_slice(
    deliverer: Deliverer, parsed: list[int], one: bytes, size: int
) -> None:
    """However the storm is cut into pieces, through the middle of its status lines too."""
    storm = one * (17 if size == 7 else 10_000)
    pieces = [storm[start : start + size] for start in range(0, len(storm), size)]
    async with serve(storm_on_a_kept_connection(pieces)) as at:
        assert isinstance(await post(deliverer, at.url()), Delivered)
        parsed.clear()
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable), outcome
    assert (outcome.error, outcome.is_maybe_delivered) == ("too_large", True)
    assert outcome.detail == "more than 16 informational answers"
    assert sum(parsed) <= 17 * len(one) + SLICE


async def test_a_storm_of_answers_behind_the_final_one_is_not_parsed_and_the_final_one_counts(
    deliverer: Deliverer, parsed: list[int]
) -> None:
    storm = answer() + b"HTTP/1.1 204 \r\n\r\n" * 10_000
    async with serve(always(storm)) as at:
        assert isinstance(await post(deliverer, at.url()), Delivered)
        assert isinstance(await post(deliverer, at.url()), Delivered)
    assert at.connections == 2
    assert max(parsed) <= SLICE
    assert sum(parsed) <= 4 * SLICE


@pytest.mark.parametrize("size", [1000, 1_000_000])
async def test_a_storm_of_tiny_chunks_is_cut_off_at_the_bound_of_framing(
    deliverer: Deliverer, parsed: list[int], size: int
) -> None:
    storm = CHUNKED + b"1\r\na\r\n" * 60_000 + b"0\r\n\r\n"
    pieces = [storm[start : start + size] for start in range(0, len(storm), size)]
    async with serve(storm_on_a_kept_connection(pieces)) as at:
        assert isinstance(await post(deliverer, at.url()), Delivered)
        parsed.clear()
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable), outcome
    assert (outcome.error, outcome.is_maybe_delivered) == ("too_large", True)
    assert sum(parsed) <= 6 * (MAX_FRAMING // 5) + 3 * SLICE


async def test_a_storm_of_tiny_chunks_behind_all_that_is_read_is_dropped_and_the_status_counts(
    deliverer: Deliverer, parsed: list[int]
) -> None:
    storm = CHUNKED + b"10400\r\n" + b"y" * 0x10400 + b"\r\n" + b"1\r\na\r\n" * 100_000
    async with serve(once(storm)) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Delivered), outcome
    assert outcome.answer.truncated
    assert sum(parsed) <= 0x10400 + 6 * (MAX_FRAMING // 5) + 3 * SLICE


async def test_an_answer_in_a_few_thousand_chunks_is_delivered(deliverer: Deliverer) -> None:
    async with serve(always(CHUNKED + b"1\r\na\r\n" * 6000 + b"0\r\n\r\n")) as at:
        for _ in range(2):
            outcome = await post(deliverer, at.url())
            assert isinstance(outcome, Delivered), outcome
    assert at.connections == 1


async def test_a_few_informational_answers_are_passed_over(deliverer: Deliverer) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 16

    async def polite(peer: Peer) -> None:
        await peer.request()
        await peer.send(early + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serve(polite) as at:
        assert isinstance(await post(deliverer, at.url()), Delivered)


@pytest.mark.parametrize(
    ("before", "data"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n", b"y" * 65_536),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"y" * 65_536),
        (CHUNKED, b"10\r\n" + b"y" * 16 + b"\r\n"),
    ],
)
async def test_an_endless_body_is_read_to_a_bound_and_the_status_counts(
    deliverer: Deliverer, before: bytes, data: bytes
) -> None:
    ended = asyncio.Event()
    async with serve(flood(before, data, ended)) as at:
        outcome = await post(deliverer, at.url())
        await ended.wait()  # we hung up
    assert isinstance(outcome, Delivered)
    assert outcome.answer.excerpt == "y" * MAX_EXCERPT
    assert outcome.answer.truncated


async def test_endless_framing_without_data_is_cut_off(deliverer: Deliverer) -> None:
    ended = asyncio.Event()
    async with serve(flood(CHUNKED + b"1;ext=", b"y" * 65_536, ended)) as at:
        outcome = await post(deliverer, at.url())
        await ended.wait()
    assert isinstance(outcome, Unreachable)
    assert outcome.error in ("too_large", "protocol")


async def test_a_head_of_many_fields_or_a_huge_field_is_refused(deliverer: Deliverer) -> None:
    many = "".join(f"X-{number}: y\r\n" for number in range(200))
    async with serve(always(answer(headers=many))) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable)
    async with serve(always(answer(headers=f"X: {'y' * 1_000_000}\r\n"))) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Unreachable)
    assert outcome.error == "too_large"


async def test_a_compressed_body_is_not_inflated(deliverer: Deliverer) -> None:
    bomb = gzip.compress(bytes(20_000_000))
    async with serve(always(answer(headers="Content-Encoding: gzip\r\n", body=bomb))) as at:
        outcome = await post(deliverer, at.url())
    assert isinstance(outcome, Delivered)
    assert len(bomb) < MAX_RECEIVED
    assert dict(outcome.answer.headers)["content-length"] == str(len(bomb))
    assert outcome.answer.excerpt == excerpt_of(bomb)  # as it came, not what it would inflate to


async def test_an_upgrade_nobody_asked_for_is_rejected_and_the_connection_closed(
    deliverer: Deliverer,
) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nfree talk"
        )
        await peer.gone()
        gone.set()

    async with serve(script) as at:
        outcome = await post(deliverer, at.url())
        await gone.wait()
    assert isinstance(outcome, Rejected)
    assert outcome.answer.status == 101


async def test_running_out_of_files_is_named_as_our_own_lack(
    deliverer: Deliverer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*args: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(deliver_pool, "open_guarded_socket", none_left)
    outcome = await post(deliverer, "http://127.0.0.1:40000/")
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("local", False)


async def test_cancelled_deliveries_leave_no_slot_behind(deliverer: Deliverer) -> None:
    """More callers than connections, each cancelled at some turn of the loop: dialling, queueing, sending,
    reading."""
    rng = random.Random(7)
    async with serve(always(answer(headers="X: y\r\n", body=b"z" * 10_000))) as at:
        for _ in range(30):
            tasks = [asyncio.create_task(post(deliverer, at.url())) for _ in range(25)]
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, 20):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        outcomes = await asyncio.gather(*(post(deliverer, at.url()) for _ in range(50)))
        assert all(isinstance(outcome, Delivered) for outcome in outcomes)
        assert len(deliverer._pool._acquired) == 0


async def test_idle_connections_to_many_hosts_are_bounded() -> None:
    few = open_session(WITH_LOOPBACK, connections=2)
    pool = few._pool
    open_counts = []
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(serve(answer_ok)) for _ in range(10)]
        for at in [*targets, *targets]:
            assert isinstance(await post(few, at.url()), Delivered)
            open_counts.append(pool.open_count)
        await few.close()
        await eventually(lambda: pool.open_count == 0)
    assert open_counts[:3] == [1, 2, 3]  # kept for the next request …
    assert max(open_counts) == 4  # … up to twice the connections
    assert all(at.connections == 2 for at in targets)


async def test_no_more_requests_are_under_way_than_there_are_connections() -> None:
    few = open_session(WITH_LOOPBACK, connections=2)
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await go.wait()
            await peer.send(answer())

    async with serve(script) as at:
        attempts = [asyncio.create_task(post(few, at.url())) for _ in range(6)]
        await eventually(lambda: len(at.requests) == 2)
        assert at.connections == 2
        go.set()
        assert all(isinstance(outcome, Delivered) for outcome in await asyncio.gather(*attempts))
        await few.close()
    assert (at.connections, len(at.requests)) == (2, 6)


async def test_the_bound_is_one_answers_not_one_connections(deliverer: Deliverer) -> None:
    body = b"y" * 60_000
    async with serve(always(answer(body=body))) as at:
        for _ in range(MAX_RECEIVED // len(body) + 2):
            assert isinstance(await post(deliverer, at.url()), Delivered)
    assert at.connections == 1
