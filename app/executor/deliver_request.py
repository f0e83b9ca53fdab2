"""A request as bytes. What all requests to one target share is put together once; an attempt adds its own headers
and its body.

Nothing gets into a head that could end a line: names are checked as tokens and values for control characters, those
of a stored target too, whatever was allowed when it was stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from aiohttp.client_reqrep import ClientRequest
from multidict import CIMultiDict
from yarl import URL

from app.domain.address import AddressPolicy
from app.domain.outcome import Sent
from app.domain.target import MASK, METHODS, masked, url_problem

USER_AGENT = f"Carillon/{version('carillon')}"
UNTYPED = "application/octet-stream"
"""The Content-Type of a body whose owner named none (RFC 9110, section 8.3)."""

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
    requests to an origin."""

    def __init__(self, url: URL) -> None:
        super().__init__("GET", url)
        self.key = self.connection_key


@dataclass(frozen=True, slots=True)
class Prepared:
    """What every request to one target shares: all but its body and the values of the attempt's own headers.

    `problem` says why nothing may be sent, and then there is no `origin`.
    """

    method: str
    url: str
    origin: Origin | None
    head: bytes
    own_lines: str
    shown: tuple[tuple[str, str], ...]
    has_secrets: bool
    problem: str | None

    def request(self, values: Sequence[str], body: bytes) -> bytes:
        """The whole request; `values` are those of the attempt's headers, in the order of their names.

        Raises ValueError for a value that could break out of its line.
        """
        together = "".join(values)
        # The first question is quick, and nearly always enough.
        if not together.isprintable() and _CONTROL.search(together):
            raise ValueError("a header of the attempt has a control character")
        own = (self.own_lines % tuple(values)).encode()
        if body:
            return b"%b%bContent-Length: %d\r\n\r\n%b" % (self.head, own, len(body), body)
        return b"%b%b%b" % (self.head, own, b"\r\n" if self.method in _WITHOUT_LENGTH else _NO_BODY)

    def sent(self, headers: Sequence[tuple[str, str]], body_bytes: int) -> Sent:
        """The request as history keeps it; `headers` are the attempt's."""
        own = (
            tuple((name, masked(name, value)) for name, value in headers)
            if self.has_secrets
            else tuple(headers)
        )
        return Sent(self.method, self.url, self.shown + own, body_bytes)


_NO_BODY = b"Content-Length: 0\r\n\r\n"


def prepare(
    method: str,
    url: str,
    given: tuple[tuple[str, str], ...],
    *,
    has_body: bool,
    names: tuple[str, ...],
    policy: AddressPolicy,
    origin_of: Callable[[URL], Origin],
) -> Prepared:
    """Put together what requests to this target share, in the running event loop. `given` are the target's headers,
    `names` those of the attempt's, which win."""
    headers = CIMultiDict({"User-Agent": USER_AGENT, "Accept": "*/*"})
    if has_body:
        headers["Content-Type"] = UNTYPED
    headers.update(given)
    headers["Accept-Encoding"] = "identity"
    for name in names:
        headers.popall(name, None)
    problem = url_problem(url, policy) or _form_problem(method, headers, names)
    return Prepared(
        method=method,
        url=url,
        origin=None if problem else origin_of(URL(url, encoded=True).origin()),
        head=b"" if problem else _head(method, URL(url, encoded=True), headers),
        own_lines="".join(f"{name.replace('%', '%%')}: %s\r\n" for name in names),
        shown=tuple((str(name), masked(name, value)) for name, value in headers.items()),
        has_secrets=any(masked(name, "") == MASK for name in names),
        problem=problem,
    )


def _form_problem(method: str, headers: CIMultiDict[str], names: tuple[str, ...]) -> str | None:
    """What a target that got into the database past `app.domain.target` must not do to the bytes of a request."""
    if method not in METHODS:
        return f"the method is none of {', '.join(METHODS)}"
    for name, value in headers.items():
        if name.lower() in _FRAMING:
            return f"the header {name} is set by the connection and cannot be given"
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            return "a header has a character that cannot be sent"
    if not all(_TOKEN.fullmatch(name) for name in names):
        raise ValueError("a header of the attempt has an impossible name")
    return None


def _head(method: str, url: URL, headers: CIMultiDict[str]) -> bytes:
    """The request line and all header lines up to those of the attempt."""
    lines = [
        f"{method} {url.raw_path_qs} HTTP/1.1",
        f"Host: {url.host_port_subcomponent}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n").encode()
