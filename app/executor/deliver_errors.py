"""From what the HTTP engine raises to what it means: the one map, the most specific class first.

The texts are ours. The engine's and the system's name resolved addresses, and those of inner networks are
nobody's business (`Connect call failed ('10.0.0.1', 443)`).
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from app.domain.address import REFUSED
from app.domain.outcome import Blocked, Timing, Unreachable
from app.executor.deliver_answer import safe_text
from app.executor.deliver_pool import AnswerTooLarge, StaleConnection
from app.executor.guard import TargetBlocked

EXCHANGE_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError)
"""What an exchange raises for the doings of a target, a network or this machine."""

# Our own lack of files, memory or ports; never the target's doing.
_LOCAL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_NAME_TEXTS = {
    socket.EAI_NONAME: "the name does not exist",
    socket.EAI_AGAIN: "the name could not be resolved for the moment",
}


def meaning_of(error: Exception, *, is_tls: bool, is_sent: bool, timing: Timing) -> Blocked | Unreachable:
    """The outcome of an attempt that ended with `error`; `is_sent` says whether its request may have left."""
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, TargetBlocked):
            return Blocked(REFUSED, timing)
        if error.errno in _LOCAL:
            detail = f"this replica could not open a connection: {_text_of(error)}"
            return Unreachable("local", detail, is_maybe_delivered=is_sent, timing=timing)
        if is_tls and isinstance(error.os_error, ConnectionResetError | ConnectionAbortedError):
            # TCP refuses or times out; what is reset is the handshake on top of it.
            detail = "the peer hung up during the TLS handshake"
            return Unreachable("tls", detail, is_maybe_delivered=is_sent, timing=timing)
    told = _inmost(error)
    kind, describe = next((kind, describe) for known, kind, describe in _MEANINGS if isinstance(told, known))
    return Unreachable(kind, describe(told), is_maybe_delivered=is_sent, timing=timing)


def _inmost(error: BaseException) -> BaseException:
    """A long line or a TLS failure that the engine wrapped says more than what it is wrapped in."""
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, LineTooLong | ssl.SSLError):
            return cause
        cause = cause.__cause__
    return error


def _say(text: str) -> Callable[[BaseException], str]:
    return lambda _: text


def _dns_text(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return _NAME_TEXTS.get(number or 0, "the name could not be resolved")


def _tls_text(error: BaseException) -> str:
    """What TLS says of the peer: names and dates of certificates, no addresses of ours."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return safe_text(f"the certificate was refused: {error.verify_message}")[:300]
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"the TLS connection failed: {error.reason.lower().replace('_', ' ')}"
    return "the TLS connection failed"


def _text_of(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else "the connection failed"


_MEANINGS: tuple[tuple[type[BaseException], str, Callable[[BaseException], str]], ...] = (
    (AnswerTooLarge, "too_large", str),
    (StaleConnection, "protocol", str),
    (LineTooLong, "too_large", _say("a line of the answer's head is too long")),
    (ssl.SSLError, "tls", _tls_text),
    (aiohttp.ClientConnectorDNSError, "dns", _dns_text),
    (aiohttp.ClientConnectorError, "connect", _text_of),
    (aiohttp.ServerDisconnectedError, "disconnected", _say("the connection ended before an answer")),
    (aiohttp.ClientPayloadError, "disconnected", _say("the answer ended before it was complete")),
    (HttpProcessingError, "protocol", _say("the answer is not valid HTTP/1.1")),
    (OSError, "disconnected", _text_of),
    (aiohttp.ClientConnectionError, "disconnected", _say("the connection was lost")),
    (BaseException, "protocol", _say("the exchange failed")),
)
