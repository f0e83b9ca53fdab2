"""What is kept of an answer is bounded and storable, whatever the target sends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.address import WITH_LOOPBACK
from app.domain.outcome import Answer, Delivered
from app.domain.target import Target
from app.executor.deliver import Deliverer, open_session
from app.executor.deliver_answer import MAX_EXCERPT, MAX_KEPT_HEADERS, MAX_KEPT_VALUE, MAX_READ, excerpt_of
from app.executor.flight import Flight
from tests.executor.targets import always, answer, once, serve
from tests.executor.test_deliver import AMPLE

ON_BOTH_LOOPS = True


@pytest.fixture
async def deliverer() -> AsyncIterator[Deliverer]:
    opened = open_session(WITH_LOOPBACK, connections=4)
    yield opened
    await opened.close()


async def answer_to(deliverer: Deliverer, data: bytes) -> Answer:
    async with serve(once(data)) as at:
        outcome, _ = await deliverer.deliver(
            Target("GET", at.url(), (), None),
            headers=(),
            deadline=AMPLE,
            before_send=lambda: None,
            flight=Flight(),
        )
    assert isinstance(outcome, Delivered), outcome
    return outcome.answer


@pytest.mark.parametrize(
    ("body", "excerpt"),
    [
        (b"", ""),
        (b"plain \t\r\n text", "plain \t\r\n text"),
        ("žluťoučký 🐎".encode(), "žluťoučký 🐎"),
        (b"a\x00b", "a\ufffdb"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"a":"\\u0000"}', '{"a":"\\u0000"}'),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"cut \xf0\x9f\x90", "cut \ufffd"),
        (b"\x1b[2J\x7f\xc2\x9b1m", "\ufffd[2J\ufffd\ufffd1m"),
        ("UTF-16".encode("utf-16-le"), "U\ufffdT\ufffdF\ufffd-\ufffd1\ufffd6\ufffd"),
    ],
)
def test_an_excerpt_is_text_that_storage_takes_and_terminals_do_not_obey(body: bytes, excerpt: str) -> None:
    assert excerpt_of(body) == excerpt


def test_an_excerpt_is_cut_between_characters() -> None:
    assert excerpt_of(b"x" + "é".encode() * MAX_EXCERPT) == "x" + "é" * ((MAX_EXCERPT - 1) // 2)


@given(st.binary(max_size=3 * MAX_EXCERPT))
def test_every_excerpt_can_be_stored(body: bytes) -> None:
    excerpt = excerpt_of(body)
    assert "\x00" not in excerpt
    assert len(excerpt) <= MAX_EXCERPT
    excerpt.encode()  # no lone surrogates


async def test_a_charset_nobody_knows_is_ignored(deliverer: Deliverer) -> None:
    kept = await answer_to(
        deliverer, answer(headers="Content-Type: text/x; charset=idna\r\n", body="é".encode())
    )
    assert kept.excerpt == "é"


async def test_header_values_are_bounded_and_made_safe(deliverer: Deliverer) -> None:
    lines = f"Server: \xff\x80{'y' * 5000}\r\nX-Secret-Of-Theirs: s\r\nLocation: /a\tb\r\n"
    kept = dict((await answer_to(deliverer, answer(headers=lines))).headers)
    assert set(kept) == {"server", "location", "content-length"}
    assert len(kept["server"]) == MAX_KEPT_VALUE
    kept["server"].encode()
    assert kept["server"].startswith("\ufffd\ufffdy")


async def test_repeated_headers_are_kept_up_to_a_bound(deliverer: Deliverer) -> None:
    kept = (await answer_to(deliverer, answer(headers="Retry-After: 5\r\n" * 60))).headers
    assert kept == (("retry-after", "5"),) * MAX_KEPT_HEADERS


@pytest.mark.parametrize(
    ("size", "length", "truncated", "reused"),
    [
        (MAX_EXCERPT, MAX_EXCERPT, False, True),
        (MAX_EXCERPT + 1, MAX_EXCERPT, True, True),
        (MAX_READ, MAX_EXCERPT, True, True),
        (10 * MAX_READ, MAX_EXCERPT, True, False),
    ],
)
async def test_a_body_is_read_to_its_bound_and_the_connection_kept_when_it_ended_there(
    deliverer: Deliverer, size: int, length: int, truncated: bool, reused: bool
) -> None:
    async with serve(always(answer(body=b"y" * size))) as at:
        for _ in range(2):
            outcome, _ = await deliverer.deliver(
                Target("GET", at.url(), (), None),
                headers=(),
                deadline=AMPLE,
                before_send=lambda: None,
                flight=Flight(),
            )
            assert isinstance(outcome, Delivered)
            assert len(outcome.answer.excerpt) == length
            assert outcome.answer.truncated is truncated
    assert at.connections == (1 if reused else 2)
