"""A request as bytes. What many requests share, their origin and the lines of their target's headers, is looked at and
put together once.

Nothing gets into a head that could end a line: names are checked as tokens and values for control characters, those
of a stored target too, whatever was allowed when it was stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from aiohttp.client_reqrep import ClientRequest
from multidict import CIMultiDict
from yarl import URL

from app.domain.address import AddressPolicy
from app.domain.outcome import Sent
from app.domain.target import MASK, METHODS, Target, masked, url_problem
from app.domain.url import MAX_URL

USER_AGENT = f"Carillon/{version('carillon')}"
UNTYPED = "application/octet-stream"
"""The Content-Type of a body whose owner named none (RFC 9110, section 8.3)."""

PLACES = 4096
LINES = 4096

# A URL in the normal spelling: nothing in it can be misread, so what is left to judge is its origin.
_NORMAL = re.compile(
    r"(https?://[a-z0-9._:\[\]-]+)"
    r"(/(?:[A-Za-z0-9._~/:@!$&'()*+,;=-]++|%[0-9A-Fa-f]{2})*+(?:\?(?:[A-Za-z0-9._~/:@!$&'()*+,;=?\[\]-]++|%[0-9A-Fa-f]{2})++)?)"
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Where a request ends, and what becomes of its connection, is ours to say; two voices would be smuggling.
_FRAMING = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer"),
        *("upgrade", "expect"),
    }
)
_WITHOUT_LENGTH = frozenset({"GET", "HEAD"})


class Origin(ClientRequest):
    """Whom a connection leads to. The pool takes a request and reads no more of it than this, so one serves all
    requests to an origin. Made in a running event loop."""

    def __init__(self, url: URL) -> None:
        super().__init__("GET", url)
        self.key = self.connection_key


@dataclass(frozen=True, slots=True)
class _Place:
    """What all requests to one origin share. `problem` says why nothing may be sent there, and then there is no
    `origin`."""

    origin: Origin | None
    host: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Lines:
    """What all requests with the same headers share, but for the values of the attempt's own."""

    given: str
    own: str
    shown: tuple[tuple[str, str], ...]
    has_secrets: bool
    problem: str | None


@dataclass(slots=True)
class Request:
    """`data` is all that goes to `origin`; where there is a `problem` there is neither. `sent` is for history."""

    origin: Origin | None
    data: bytes
    sent: Sent
    problem: str | None = None


class Requests:
    """Puts requests together. One per event loop."""

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy
        self._place_of = lru_cache(maxsize=PLACES)(self._judge)
        self._lines_of = lru_cache(maxsize=LINES)(_put_together)

    def compose(self, target: Target, headers: Sequence[tuple[str, str]]) -> Request:
        """The request to `target`; `headers` are the attempt's own, and win over the target's.

        Raises ValueError for those of the attempt that could break out of their line.
        """
        lines = self._lines_of(target.headers, tuple([name for name, _ in headers]), bool(target.body))
        values = [value for _, value in headers]
        together = "".join(values)
        # The first question is quick, and nearly always enough.
        if not together.isprintable() and _CONTROL.search(together):
            raise ValueError("a header of the attempt has a control character")
        own = (
            tuple((name, masked(name, value)) for name, value in headers)
            if lines.has_secrets
            else tuple(headers)
        )
        body = target.body.encode() if target.body else b""
        sent = Sent(target.method, target.url, lines.shown + own, len(body))
        place, path = self._find(target.url)
        problem = place.problem or lines.problem or _method_problem(target.method)
        if problem is not None:
            return Request(None, b"", sent, problem)
        head = (
            f"{target.method} {path} HTTP/1.1\r\nHost: {place.host}\r\n{lines.given}{lines.own % tuple(values)}"
        ).encode()
        if body:
            return Request(place.origin, b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body), sent)
        return Request(place.origin, head + (b"\r\n" if target.method in _WITHOUT_LENGTH else _NO_BODY), sent)

    def _find(self, url: str) -> tuple[_Place, str]:
        """Where `url` leads, and what the request line says of it."""
        normal = _NORMAL.fullmatch(url)
        if normal is not None and len(url) <= MAX_URL:
            return self._place_of(normal[1]), normal[2]
        problem = url_problem(url, self._policy)
        if problem is not None:
            return _Place(None, "", problem), ""
        unusual = URL(url, encoded=True)
        return self._place_of(str(unusual.origin())), unusual.raw_path_qs

    def _judge(self, origin: str) -> _Place:
        problem = url_problem(f"{origin}/", self._policy)
        if problem is not None:
            return _Place(None, "", problem)
        url = URL(f"{origin}/", encoded=True)
        return _Place(Origin(url), url.host_port_subcomponent or "")


_NO_BODY = b"Content-Length: 0\r\n\r\n"


def _put_together(
    given: tuple[tuple[str, str], ...],
    names: tuple[str, ...],
    has_body: bool,  # noqa: FBT001 - the cache knows arguments by their place
) -> _Lines:
    headers = CIMultiDict({"User-Agent": USER_AGENT, "Accept": "*/*"})
    if has_body:
        headers["Content-Type"] = UNTYPED
    headers.update(given)
    headers["Accept-Encoding"] = "identity"
    for name in names:
        if not _TOKEN.fullmatch(name):
            raise ValueError("a header of the attempt has an impossible name")
        headers.popall(name, None)
    return _Lines(
        given="".join(f"{name}: {value}\r\n" for name, value in headers.items()),
        own="".join(f"{name.replace('%', '%%')}: %s\r\n" for name in names),
        shown=tuple((str(name), masked(name, value)) for name, value in headers.items()),
        has_secrets=any(masked(name, "") == MASK for name in names),
        problem=_header_problem(headers),
    )


def _header_problem(headers: CIMultiDict[str]) -> str | None:
    """What a target that got into the database past `app.domain.target` must not do to the bytes of a request."""
    for name, value in headers.items():
        if name.lower() in _FRAMING:
            return f"the header {name} is set by the connection and cannot be given"
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            return "a header has a character that cannot be sent"
    return None


def _method_problem(method: str) -> str | None:
    return None if method in METHODS else f"the method is none of {', '.join(METHODS)}"
