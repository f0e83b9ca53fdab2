"""The bytes of a request, and that nothing which somebody planted can end a line of its head."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp.client_reqrep import ClientRequest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from app.domain.address import PUBLIC_ONLY, WITH_LOOPBACK
from app.domain.outcome import Blocked, Delivered
from app.domain.target import MASK, MAX_BODY_BYTES, Target, url_problem
from app.executor.deliver import Deliverer, open_session
from app.executor.deliver_request import USER_AGENT, Requests
from app.executor.flight import Flight
from tests.executor.targets import answer_ok, serve
from tests.executor.test_deliver import IDENTITY, send

NAMES = tuple(name for name, _ in IDENTITY)
OWN_LINES = "webhook-id: 0191f3c2\r\nwebhook-signature: v1,c2VjcmV0\r\ncarillon-attempt: 1\r\n"


@pytest.fixture
async def deliverer() -> AsyncIterator[Deliverer]:
    opened = open_session(WITH_LOOPBACK, connections=4)
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("target", "head", "body"),
    [
        (
            Target(
                "POST", "http://127.0.0.1:{}/p?q=%20&r=a+b", (("X-Own", "100% %s"), ("accept", "a/b")), "é"
            ),
            f"POST /p?q=%20&r=a+b HTTP/1.1\r\nHost: 127.0.0.1:{{}}\r\nUser-Agent: {USER_AGENT}\r\naccept: a/b\r\n"
            f"Content-Type: application/octet-stream\r\nX-Own: 100% %s\r\nAccept-Encoding: identity\r\n{OWN_LINES}"
            "Content-Length: 2\r\n\r\n",
            "é".encode(),
        ),
        (
            Target("GET", "http://localhost:{}/", (("USER-AGENT", "mine"), ("X-Empty", "")), None),
            "GET / HTTP/1.1\r\nHost: localhost:{}\r\nUSER-AGENT: mine\r\nAccept: */*\r\nX-Empty: \r\n"
            f"Accept-Encoding: identity\r\n{OWN_LINES}\r\n",
            b"",
        ),
        (
            Target("DELETE", "http://127.0.0.1:{}/a;b/%25", (("Webhook-Id", "forged"),), ""),
            f"DELETE /a;b/%25 HTTP/1.1\r\nHost: 127.0.0.1:{{}}\r\nUser-Agent: {USER_AGENT}\r\nAccept: */*\r\n"
            f"Accept-Encoding: identity\r\n{OWN_LINES}Content-Length: 0\r\n\r\n",
            b"",
        ),
        (
            Target(
                "PUT",
                "http://127.0.0.1:{}/",
                (("content-type", "text/plain"),),
                "%s\r\n" * (MAX_BODY_BYTES // 4),
            ),
            f"PUT / HTTP/1.1\r\nHost: 127.0.0.1:{{}}\r\nUser-Agent: {USER_AGENT}\r\nAccept: */*\r\n"
            f"content-type: text/plain\r\nAccept-Encoding: identity\r\n{OWN_LINES}Content-Length: 262144\r\n\r\n",
            b"%s\r\n" * (MAX_BODY_BYTES // 4),
        ),
    ],
)
async def test_every_byte_of_a_request(deliverer: Deliverer, target: Target, head: str, body: bytes) -> None:
    async with serve(answer_ok) as at:
        url = target.url.replace("{}", str(at.port))
        for _ in range(2):
            at.raw.clear()
            outcome, _ = await send(deliverer, Target(target.method, url, target.headers, target.body))
            assert isinstance(outcome, Delivered)
            assert bytes(at.raw) == head.replace("{}", str(at.port)).encode() + body


async def test_an_ipv6_host_stands_in_brackets(deliverer: Deliverer) -> None:
    async with serve(answer_ok, host="::1") as at:
        outcome, _ = await send(deliverer, Target("GET", at.url("/x"), (), None))
    assert isinstance(outcome, Delivered)
    assert at.requests[0].header("host") == [f"[::1]:{at.port}"]


@pytest.mark.parametrize("url", ["http://example.com/", "https://example.com/", "https://example.com:443/"])
async def test_a_default_port_is_not_in_the_host(url: str) -> None:
    request = Requests(PUBLIC_ONLY).compose(Target("GET", url, (), None), ())
    assert b"\r\nHost: example.com\r\n" in request.data


@pytest.mark.parametrize("value", ["x\r\ny: z", "x\ny", "x\ry", "x\x00", "\x7f", "\x1b[2J"])
async def test_a_header_of_the_attempt_cannot_break_out_of_its_line(deliverer: Deliverer, value: str) -> None:
    flight = Flight()
    async with serve(answer_ok) as at:
        with pytest.raises(ValueError, match="control character"):
            await send(
                deliverer, Target("GET", at.url(), (), None), headers=(("webhook-id", value),), flight=flight
            )
        with pytest.raises(ValueError, match="impossible name"):
            await send(deliverer, Target("GET", at.url(), (), None), headers=((value, "x"),), flight=flight)
    assert at.connections == 0
    assert not flight.is_sent


async def test_a_head_has_as_many_lines_as_headers_or_is_not_made() -> None:
    requests = Requests(WITH_LOOPBACK)
    target = Target("GET", "http://127.0.0.1/", (), None)
    lines = requests.compose(target, IDENTITY).data.count(b"\n")

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=3, max_size=3))
    def check(values: list[str]) -> None:
        try:
            request = requests.compose(target, tuple(zip(NAMES, values, strict=True))).data
        except ValueError:
            return
        assert request.count(b"\n") == request.count(b"\r") == lines
        assert b"\x00" not in request

    check()


SPELLINGS = st.text("abzABZ019-._~/:@!$&'()*+,;=?[]% #\\\"<>\r\n\té", max_size=30)


async def test_a_url_that_is_not_looked_at_closely_is_sent_as_one_that_is() -> None:
    """The short way for URLs in the normal spelling says what the long way says."""
    requests = Requests(WITH_LOOPBACK)

    @given(
        st.sampled_from(
            ["http://127.0.0.1", "http://a.test:81", "https://[::1]:82", "http://A.test", "http://u@a"]
        ),
        SPELLINGS,
    )
    def check(origin: str, rest: str) -> None:
        url = origin + rest
        request = requests.compose(Target("GET", url, (), None), ())
        assert request.problem == url_problem(url, WITH_LOOPBACK)
        if request.problem is None:
            exact = URL(url, encoded=True)
            line = f"GET {exact.raw_path_qs} HTTP/1.1\r\nHost: {exact.host_port_subcomponent}\r\n"
            assert request.data.startswith(line.encode())
            assert request.origin is not None
            assert request.origin.key == ClientRequest("GET", exact).connection_key

    check()


@pytest.mark.parametrize(
    ("method", "headers", "why"),
    [
        ("POST", (("X", "a\r\nb: c"),), "a header has a character that cannot be sent"),
        ("POST", (("X", "a\nb: c"),), "a header has a character that cannot be sent"),
        ("POST", (("X", "a\x00"),), "a header has a character that cannot be sent"),
        ("POST", (("X\r\nY", "a"),), "a header has a character that cannot be sent"),
        ("POST", (("X ", "a"),), "a header has a character that cannot be sent"),
        ("POST", (("", "a"),), "a header has a character that cannot be sent"),
        (
            "POST",
            (("Transfer-Encoding", "chunked"),),
            "the header Transfer-Encoding is set by the connection",
        ),
        ("POST", (("content-length", "3"),), "the header content-length is set by the connection"),
        ("POST", (("Host", "other.test"),), "the header Host is set by the connection"),
        ("POST", (("Connection", "close"),), "the header Connection is set by the connection"),
        ("GET / HTTP/1.1\r\nX:", (), "the method is none of"),
        ("CONNECT", (), "the method is none of"),
    ],
)
async def test_a_planted_target_is_blocked_before_anything_is_sent(
    deliverer: Deliverer, method: str, headers: tuple[tuple[str, str], ...], why: str
) -> None:
    flight = Flight()
    async with serve(answer_ok) as at:
        outcome, _ = await send(deliverer, Target(method, at.url(), headers, "x"), flight=flight)
    assert isinstance(outcome, Blocked)
    assert outcome.detail.startswith(why)
    assert (at.connections, flight.is_sent) == (0, False)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a b",
        "http://127.0.0.1/a\r\nX: y",
        "http://user:pw@127.0.0.1/",
        "http://127.0.0.1/#x",
    ],
)
async def test_a_planted_url_is_blocked(deliverer: Deliverer, url: str) -> None:
    outcome, sent = await send(deliverer, Target("GET", url, (), None))
    assert isinstance(outcome, Blocked)
    assert outcome.detail.startswith("the URL ")
    assert sent.url == url


async def test_what_is_told_is_what_was_sent_also_where_a_header_was_forged(deliverer: Deliverer) -> None:
    async with serve(answer_ok) as at:
        _, sent = await send(deliverer, Target("GET", at.url(), (("Webhook-Id", "forged"), ("X", "y")), None))
    (received,) = at.requests
    told = [(name, value) for name, value in received.headers if name != "Host"]
    assert [(name, MASK if name == "webhook-signature" else value) for name, value in told] == list(
        sent.headers
    )
