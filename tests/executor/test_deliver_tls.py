"""TLS fails closed, says why, and trusts what we were told to trust, not what the environment says.

The certificates in tests/executor/tls are good from 2020 to 2120 (`expired.pem` until February 2020) and were
made with `openssl ca`; their keys protect nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path

import pytest

from app.domain.address import WITH_LOOPBACK
from app.domain.outcome import Delivered, Outcome, TimedOut, Unreachable
from app.domain.target import Target
from app.executor.deliver import open_session
from app.executor.deliver_pool import trusted_tls
from app.executor.flight import Flight
from tests.executor.targets import OK, Peer, answer_ok, serve

ON_BOTH_LOOPS = True

FILES = Path(__file__).parent / "tls"
AMPLE = timedelta(seconds=30)


def server_tls(name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / f"{name}.pem")
    return context


async def get(
    url: str, *, tls: ssl.SSLContext, flight: Flight | None = None, deadline: timedelta = AMPLE
) -> Outcome:
    deliverer = open_session(WITH_LOOPBACK, connections=2, tls=tls)
    try:
        outcome, _ = await deliverer.deliver(
            Target("GET", url, (), None),
            headers=(),
            deadline=deadline,
            before_send=lambda: None,
            flight=flight or Flight(),
        )
    finally:
        await deliverer.close()
    return outcome


@pytest.fixture(scope="module")
def ours() -> ssl.SSLContext:
    return trusted_tls(FILES / "ca.pem")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_verified_certificate_is_accepted(ours: ssl.SSLContext, host: str) -> None:
    async with serve(answer_ok, tls=server_tls("good")) as at:
        outcome = await get(f"https://{host}:{at.port}/", tls=ours)
    assert isinstance(outcome, Delivered)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("self_signed", "self-signed certificate"),
        ("expired", "certificate has expired"),
        ("wrong_name", "Hostname mismatch, certificate is not valid for 'localhost'."),
    ],
)
async def test_a_bad_certificate_fails_closed_and_says_why(ours: ssl.SSLContext, name: str, why: str) -> None:
    flight = Flight()
    async with serve(answer_ok, tls=server_tls(name)) as at:
        outcome = await get(f"https://localhost:{at.port}/", tls=ours, flight=flight)
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("tls", False)
    assert outcome.detail == f"the certificate was refused: {why}"
    assert not flight.is_sent
    assert at.requests == []


async def test_an_authority_named_by_the_environment_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(FILES / "ca.pem"))
    async with serve(answer_ok, tls=server_tls("good")) as at:
        outcome = await get(f"https://localhost:{at.port}/", tls=trusted_tls())
    assert isinstance(outcome, Unreachable)
    assert outcome.error == "tls"


async def test_old_tls_is_refused(ours: ssl.SSLContext) -> None:
    old = server_tls("good")
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1 is deprecated"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with serve(answer_ok, tls=old) as at:
        outcome = await get(f"https://localhost:{at.port}/", tls=ours)
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("tls", False)


async def test_there_is_no_fall_back_to_plain_http(ours: ssl.SSLContext) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(OK)
        await peer.gone()

    async with serve(script) as at:
        outcome = await get(f"https://localhost:{at.port}/secret", tls=ours)
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("tls", False)
    assert outcome.detail == "the TLS connection failed: wrong version number"
    assert b"/secret" not in at.raw


async def test_a_handshake_that_stalls_ends_at_the_deadline(ours: ssl.SSLContext) -> None:
    async def script(peer: Peer) -> None:
        await asyncio.Event().wait()

    async with serve(script) as at:
        outcome = await get(f"https://localhost:{at.port}/", tls=ours, deadline=timedelta(milliseconds=100))
    assert isinstance(outcome, TimedOut)
    assert not outcome.is_maybe_delivered


async def test_a_peer_that_hangs_up_in_the_handshake_is_unreachable(ours: ssl.SSLContext) -> None:
    async def script(peer: Peer) -> None:
        peer.reset()

    async with serve(script) as at:
        outcome = await get(f"https://localhost:{at.port}/", tls=ours)
    assert isinstance(outcome, Unreachable)
    assert (outcome.error, outcome.is_maybe_delivered) == ("tls", False)
