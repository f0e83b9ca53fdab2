"""What is sent, when, and only once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler

from app.domain.address import PUBLIC_ONLY, WITH_LOOPBACK
from app.domain.outcome import Blocked, Delivered, Outcome, Rejected, Sent, TimedOut, Unreachable
from app.domain.target import MASK, Target, parse
from app.errors import LeaseLost
from app.executor.deliver import Deliverer, open_session
from app.executor.deliver_request import USER_AGENT
from app.executor.flight import Flight
from tests.eventually import eventually
from tests.executor.targets import Peer, always, answer, answer_ok, refused_port, serve

ON_BOTH_LOOPS = True

AMPLE = timedelta(seconds=30)
SHORT = timedelta(milliseconds=200)
IDENTITY = (("webhook-id", "0191f3c2"), ("webhook-signature", "v1,c2VjcmV0"), ("carillon-attempt", "1"))


@pytest.fixture
async def deliverer() -> AsyncIterator[Deliverer]:
    opened = open_session(WITH_LOOPBACK, connections=20)
    yield opened
    await opened.close()


async def send(
    deliverer: Deliverer,
    target: Target,
    *,
    deadline: timedelta = AMPLE,
    headers: Sequence[tuple[str, str]] = IDENTITY,
    before_send: Callable[[], None] = lambda: None,
    flight: Flight | None = None,
) -> tuple[Outcome, Sent]:
    return await deliverer.deliver(
        target, headers=headers, deadline=deadline, before_send=before_send, flight=flight or Flight()
    )


async def test_a_2xx_answer_is_delivered_with_its_evidence(deliverer: Deliverer) -> None:
    async with serve(
        always(answer("201 Created", "Content-Type: text/plain\r\nX-Inner: no\r\n", b"done"))
    ) as at:
        outcome, sent = await send(deliverer, parse({"url": at.url("/hook?a=1"), "body": '{"n":1}'}))
    assert isinstance(outcome, Delivered)
    assert outcome.answer.status == 201
    assert outcome.answer.headers == (("content-type", "text/plain"), ("content-length", "4"))
    assert (outcome.answer.excerpt, outcome.answer.truncated) == ("done", False)
    timing = outcome.timing
    assert timing.connect is not None
    assert timing.first_byte is not None
    assert timedelta() <= timing.connect <= timing.first_byte <= timing.total
    assert (sent.method, sent.url, sent.body_bytes) == ("POST", at.url("/hook?a=1"), 7)


async def test_the_request_has_our_headers_and_the_targets_and_no_others(deliverer: Deliverer) -> None:
    target = {"url": "", "headers": {"X-Own": "1", "Authorization": "Bearer s3cret"}, "body": "plain text"}
    async with serve(answer_ok) as at:
        await send(deliverer, parse(target | {"url": at.url("/p?q=%20")}))
    (received,) = at.requests
    assert received.line == "POST /p?q=%20 HTTP/1.1"
    assert received.body == b"plain text"
    assert sorted((name.lower(), value) for name, value in received.headers) == [
        ("accept", "*/*"),
        ("accept-encoding", "identity"),
        ("authorization", "Bearer s3cret"),
        ("carillon-attempt", "1"),
        ("content-length", "10"),
        ("content-type", "text/plain; charset=utf-8"),
        ("host", f"127.0.0.1:{at.port}"),
        ("user-agent", USER_AGENT),
        ("webhook-id", "0191f3c2"),
        ("webhook-signature", "v1,c2VjcmV0"),
        ("x-own", "1"),
    ]


async def test_what_was_sent_is_told_without_its_secrets(deliverer: Deliverer) -> None:
    target = {"url": "", "headers": {"X-Own": "1", "Authorization": "Bearer s3cret", "X-Api-Key": "k3y"}}
    async with serve(answer_ok) as at:
        _, sent = await send(deliverer, parse(target | {"url": at.url()}))
    told = dict(sent.headers)
    assert told["X-Own"] == "1"
    assert told["webhook-id"] == "0191f3c2"
    assert told["Authorization"] == told["X-Api-Key"] == told["webhook-signature"] == MASK
    assert "s3cret" not in repr(sent)
    assert "k3y" not in repr(sent)


async def test_the_attempts_headers_win_over_a_targets_that_was_stored_before_they_were_reserved(
    deliverer: Deliverer,
) -> None:
    async with serve(answer_ok) as at:
        await send(
            deliverer,
            Target(
                "POST",
                at.url(),
                (("webhook-id", "forged"), ("Carillon-Attempt", "9"), ("accept-encoding", "gzip")),
                "x",
            ),
        )
    (received,) = at.requests
    assert received.header("webhook-id") == ["0191f3c2"]
    assert received.header("carillon-attempt") == ["1"]
    assert received.header("accept-encoding") == ["identity"]


@pytest.mark.parametrize(
    ("method", "body", "length", "content_type"),
    [
        ("GET", None, [], []),
        ("HEAD", None, [], []),
        ("POST", None, ["0"], []),
        ("PUT", "", ["0"], []),
        ("DELETE", None, ["0"], []),
        ("PATCH", "é", ["2"], ["application/octet-stream"]),
        ("DELETE", "x", ["1"], ["application/octet-stream"]),
    ],
)
async def test_every_method_is_framed_right_with_and_without_a_body(
    deliverer: Deliverer, method: str, body: str | None, length: list[str], content_type: list[str]
) -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" if method == "HEAD" else answer()
    async with serve(always(reply)) as at:
        for _ in range(2):  # the second one shows that the connection is in step
            outcome, _ = await send(deliverer, Target(method, at.url(), (), body))
            assert isinstance(outcome, Delivered)
    assert at.connections == 1
    for received in at.requests:
        assert received.line.startswith(method + " ")
        assert received.header("content-length") == length
        assert received.header("content-type") == content_type
        assert received.body == (body or "").encode()


@pytest.mark.parametrize(
    "status",
    ["000", "099", "199", "300", "304", "400", "408", "410", "418", "429", "500", "599", "600", "999"],
)
async def test_every_other_final_status_is_rejected(deliverer: Deliverer, status: str) -> None:
    reply = f"HTTP/1.1 {status} Some\r\nContent-Length: 0\r\n\r\n".encode()
    if status == "199":
        reply = b"HTTP/1.1 199 Odd\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"
    async with serve(always(reply)) as at:
        outcome, _ = await send(deliverer, Target("GET", at.url(), (), None))
    assert isinstance(outcome, Rejected)
    assert outcome.answer.status == (400 if status == "199" else int(status))


@pytest.mark.parametrize("status", ["200", "202", "204", "205", "206", "226", "299"])
async def test_every_2xx_is_a_success(deliverer: Deliverer, status: str) -> None:
    reply = f"HTTP/1.1 {status} Fine\r\n" + ("\r\n" if status == "204" else "Content-Length: 0\r\n\r\n")
    async with serve(always(reply.encode())) as at:
        outcome, _ = await send(deliverer, Target("GET", at.url(), (), None))
    assert isinstance(outcome, Delivered)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed_and_names_its_location(deliverer: Deliverer, status: int) -> None:
    async with serve(answer_ok) as other:
        reply = answer(f"{status} Moved", f"Location: {other.url('/next')}\r\n")
        async with serve(always(reply)) as at:
            outcome, _ = await send(deliverer, parse({"url": at.url(), "body": "{}"}))
    assert isinstance(outcome, Rejected)
    assert ("location", other.url("/next")) in outcome.answer.headers
    assert len(at.requests) == 1
    assert other.connections == 0


async def test_cookies_are_not_kept(deliverer: Deliverer) -> None:
    async with serve(always(answer(headers="Set-Cookie: session=1; Path=/\r\n"))) as at:
        await send(deliverer, Target("GET", at.url(), (), None))
        outcome, _ = await send(deliverer, Target("GET", at.url(), (), None))
    assert isinstance(outcome, Delivered)
    assert [received.header("cookie") for received in at.requests] == [[], []]
    assert "set-cookie" not in dict(outcome.answer.headers)


async def test_proxies_and_netrc_of_the_environment_are_ignored(
    deliverer: Deliverer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("default login somebody password canary\n")
    netrc.chmod(0o600)
    async with serve(answer_ok) as proxy, serve(answer_ok) as at:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(netrc))
        assert os.environ["HTTP_PROXY"] == proxy.url()
        outcome, _ = await send(deliverer, Target("GET", at.url(), (), None))
    assert isinstance(outcome, Delivered)
    assert proxy.connections == 0
    assert at.requests[0].header("authorization") == []


async def hang_up_on_second_request(peer: Peer) -> None:
    """A kept-alive connection that dies as it is used again, having taken the request."""
    await peer.request()
    await peer.send(answer())
    await peer.request()
    peer.reset()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "POST", "PATCH"])
async def test_a_request_is_never_sent_twice_when_a_reused_connection_dies(
    deliverer: Deliverer, method: str
) -> None:
    async with serve(hang_up_on_second_request) as at:
        first, _ = await send(deliverer, Target("GET", at.url("/first"), (), None))
        second, _ = await send(deliverer, Target(method, at.url("/second"), (), None))
    assert isinstance(first, Delivered)
    assert isinstance(second, Unreachable)
    assert (second.error, second.is_maybe_delivered) == ("disconnected", True)
    assert [received.line.split()[1] for received in at.requests] == ["/first", "/second"]


async def test_the_session_of_the_engine_would_send_twice() -> None:
    """Shows that the test above can fail: by aiohttp's own session the second request arrives twice."""
    async with serve(hang_up_on_second_request) as at, aiohttp.ClientSession() as session:
        for path in ("/first", "/second"):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(at.url(path)):
                    pass
    assert [received.line.split()[1] for received in at.requests] == ["/first", "/second", "/second"]


async def test_a_connection_that_spoke_while_it_was_idle_is_not_used_again(deliverer: Deliverer) -> None:
    """Servers say 408 on idle connections; it must not be taken for the answer to the next request."""
    answered = asyncio.Event()

    async def script(peer: Peer) -> None:
        if await peer.request() is not None:
            await peer.send(answer())
            await answered.wait()
            answered.clear()
            await peer.send(b"HTTP/1.1 408 Request Time-out\r\nContent-Length: 0\r\n\r\n")
            await peer.gone()

    async with serve(script) as at:
        for _ in range(3):
            outcome, _ = await send(deliverer, Target("GET", at.url(), (), None))
            assert isinstance(outcome, Delivered), outcome
            assert len(idle_connections(deliverer)) == 1
            answered.set()
            await eventually(lambda: all(idle.should_close for idle in idle_connections(deliverer)))
    assert (at.connections, len(at.requests)) == (3, 3)


def idle_connections(deliverer: Deliverer) -> list[ResponseHandler]:
    return [protocol for idle in deliverer._pool._conns.values() for protocol, _ in idle]


async def test_before_send_is_called_once_when_the_connection_is_there_and_nothing_has_left(
    deliverer: Deliverer,
) -> None:
    flight = Flight()
    seen: list[tuple[bool, str, int]] = []
    async with serve(answer_ok) as at:
        await send(
            deliverer,
            Target("POST", at.url(), (), "x"),
            flight=flight,
            before_send=lambda: seen.append((flight.is_sent, flight.phase, len(at.raw))),
        )
    assert seen == [(False, "connect", 0)]
    assert flight.is_sent
    assert flight.phase == "body"


@pytest.mark.parametrize("reused", ["new connection", "reused connection"])
async def test_a_lease_lost_before_sending_stops_the_request(deliverer: Deliverer, reused: str) -> None:
    def refuse() -> None:
        raise LeaseLost

    flight = Flight()
    async with serve(answer_ok) as at:
        if reused == "reused connection":
            await send(deliverer, Target("GET", at.url("/first"), (), None))
        with pytest.raises(LeaseLost):
            await send(
                deliverer, Target("POST", at.url("/stopped"), (), "x"), before_send=refuse, flight=flight
            )
        await deliverer.close()
    assert not flight.is_sent
    assert b"/stopped" not in at.raw


async def test_a_cancelled_delivery_tells_that_its_request_had_left(deliverer: Deliverer) -> None:
    arrived = asyncio.Event()
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        arrived.set()
        await peer.gone()
        gone.set()

    flight = Flight()
    async with serve(script) as at:
        task = asyncio.create_task(send(deliverer, Target("POST", at.url(), (), "x"), flight=flight))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()  # the connection was closed, not kept for another request
    assert flight.is_sent
    assert flight.sent is not None
    assert (flight.sent.url, flight.sent.body_bytes) == (at.url(), 1)


async def test_a_delivery_cancelled_before_its_connection_stands_tells_that_nothing_has_left(
    deliverer: Deliverer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving = asyncio.Event()

    async def never(host: str) -> None:
        resolving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(deliverer._resolver, "_wait_for", never)
    flight = Flight()
    task = asyncio.create_task(send(deliverer, Target("POST", "http://slow.test/", (), "x"), flight=flight))
    await resolving.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (flight.is_sent, flight.phase) == (False, "dns")


async def test_a_slow_name_look_up_counts_into_the_deadline(
    deliverer: Deliverer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(host: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(deliverer._resolver, "_wait_for", never)
    outcome, _ = await send(deliverer, Target("GET", "http://slow.test/", (), None), deadline=SHORT)
    assert isinstance(outcome, TimedOut)
    assert (outcome.phase, outcome.is_maybe_delivered) == ("dns", False)


async def test_a_refused_connection_is_unreachable_and_names_no_address(deliverer: Deliverer) -> None:
    with refused_port() as port:
        outcome, _ = await send(deliverer, Target("GET", f"http://localhost:{port}/", (), None))
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("connect", False)
    assert outcome.detail == "connection refused"


async def test_a_blocked_target_is_not_even_connected_to() -> None:
    guarded = open_session(PUBLIC_ONLY, connections=2)
    flight = Flight()
    async with serve(answer_ok) as at:
        outcome, sent = await send(guarded, Target("GET", at.url(), (), None), flight=flight)
        await guarded.close()
    assert isinstance(outcome, Blocked)
    assert "127.0.0.1" not in outcome.detail
    assert sent.url == at.url()
    assert (at.connections, flight.is_sent) == (0, False)
