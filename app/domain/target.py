"""Where a run is sent and what is sent: validated shape at create, plain data afterwards.

`parse` looks at form only. Whether the address may be used is `check_allowed`'s question at create and
update, and the guard's at every connection; both ask `app.domain.address`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import orjson

from app.domain.address import AddressPolicy, origin_problem
from app.domain.url import parse_url
from app.errors import InvalidInput

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
MAX_BODY_BYTES = 256 * 1024
MAX_HEADERS = 32
MAX_HEADER_NAME = 128
MAX_HEADER_VALUE = 4096
MAX_HEADER_BYTES = 16 * 1024
"""All names and values together; common servers refuse heads above 8 to 32 KiB."""

# Set by Carillon, by the HTTP engine, or meaningful only between two hops (RFC 9110, section 7.6.1).
RESERVED_NAMES = frozenset(
    {
        *(
            "host",
            "content-length",
            "transfer-encoding",
            "connection",
            "keep-alive",
            "te",
            "trailer",
            "upgrade",
        ),
        *("expect", "accept-encoding", "http2-settings", "traceparent", "tracestate", "idempotency-key"),
    }
)
RESERVED_PREFIXES = ("webhook-", "carillon-", "proxy-")

_FIELDS = ("method", "url", "headers", "body")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?|")
_SECRET_NAME = re.compile(
    r"auth|cookie|token|secret|signature|signing|passw|[-_]pass$|pwd|credential|session|jwt|bearer"
    r"|api-?_?key|access-?_?key|(?:^|[-_])key$",
    re.IGNORECASE,
)
MASK = "[redacted]"


@dataclass(frozen=True, slots=True)
class Target:
    """One request as its owner wrote it. `url` is in the normal spelling of `app.domain.url`; the body is
    UTF-8 text."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: str | None


def parse(data: Mapping[str, object]) -> Target:
    """Read a target as the API and the import take it; `headers` is an object of name to value.

    A body without a Content-Type gets one here, where its owner can see it: application/json when it is JSON,
    else text/plain. Raises InvalidInput naming the field (`target.url`, `target.headers.X-Foo`, …).
    """
    for name in data:
        if name not in _FIELDS:
            raise InvalidInput(
                "target", f"has an unknown field {_shown(name)}; allowed: {', '.join(_FIELDS)}"
            )
    method = _parse_method(data.get("method", "POST"))
    url = data.get("url")
    if not isinstance(url, str):
        raise InvalidInput("target.url", "must be given, as text such as https://example.com/path")
    try:
        normal = str(parse_url(url))
    except ValueError as problem:
        raise InvalidInput("target.url", str(problem)) from None
    headers = _parse_headers(data.get("headers"))
    body = _parse_body(data.get("body"), method)
    if body is not None and not any(name.lower() == "content-type" for name, _ in headers):
        headers = (*headers, ("Content-Type", _content_type_of(body)))
    return Target(method=method, url=normal, headers=headers, body=body)


def check_allowed(target: Target, policy: AddressPolicy) -> None:
    """Refuse at create and update what the guard would refuse at send, as far as the text of the URL tells.

    Raises InvalidInput for `target.url`. Names are judged again at every connection, when they are resolved.
    """
    problem = url_problem(target.url, policy)
    if problem is not None:
        raise InvalidInput("target.url", problem)


def url_problem(url: str, policy: AddressPolicy) -> str | None:
    """What `policy`, or the form of the URL itself, says against sending to `url`; None when nothing does."""
    try:
        parts = parse_url(url)
    except ValueError as problem:
        return f"the URL {problem}"
    return origin_problem(parts.scheme, parts.host, parts.port, policy)


def origin_of(target: Target) -> str:
    """`scheme://host:port`, always with the port: the key of breakers and caps."""
    return parse_url(target.url).origin


def masked(name: str, value: str) -> str:
    """`value` as history may keep it: the values of headers that carry secrets are not stored."""
    return MASK if _is_secret(name) else value


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def to_json(target: Target) -> str:
    """The text for `schedule.target`. Headers are pairs, because jsonb forgets the order of an object's
    members."""
    return json.dumps(
        {"method": target.method, "url": target.url, "headers": target.headers, "body": target.body},
        separators=(",", ":"),
    )


def from_json(text: str) -> Target:
    """Read what `to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    data = orjson.loads(text)
    return Target(
        method=str(data["method"]),
        url=str(data["url"]),
        headers=tuple((str(name), str(value)) for name, value in data["headers"]),
        body=None if data["body"] is None else str(data["body"]),
    )


def _parse_method(given: object) -> str:
    method = given.upper() if isinstance(given, str) and given.isascii() else None
    if method not in METHODS:
        raise InvalidInput("target.method", f"must be one of {', '.join(METHODS)}")
    return method


def _parse_headers(given: object) -> tuple[tuple[str, str], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise InvalidInput("target.headers", "must be an object of header names and text values")
    if len(given) > MAX_HEADERS:
        raise InvalidInput("target.headers", f"has more than {MAX_HEADERS} headers")
    seen: set[str] = set()
    for name, value in given.items():
        _check_header(name, value)
        if name.lower() in seen:
            raise InvalidInput(f"target.headers.{name}", "is given twice (upper and lower case are the same)")
        seen.add(name.lower())
    if sum(len(name) + len(value) + 4 for name, value in given.items()) > MAX_HEADER_BYTES:
        raise InvalidInput("target.headers", f"is larger than {MAX_HEADER_BYTES} bytes altogether")
    return tuple(given.items())


def _check_header(name: object, value: object) -> None:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name) or len(name) > MAX_HEADER_NAME:
        raise InvalidInput(
            "target.headers",
            f"has an invalid name {_shown(name)}; "
            f"allowed: up to {MAX_HEADER_NAME} letters, digits and !#$%&'*+.^_`|~-",
        )
    where = f"target.headers.{name}"
    lower = name.lower()
    if lower in RESERVED_NAMES or lower.startswith(RESERVED_PREFIXES):
        raise InvalidInput(where, "is set by Carillon or by the connection and cannot be given")
    if not isinstance(value, str):
        raise InvalidInput(where, "must be text")
    if len(value) > MAX_HEADER_VALUE:
        raise InvalidInput(where, f"is longer than {MAX_HEADER_VALUE} characters")
    if not _VALUE.fullmatch(value):
        raise InvalidInput(
            where, "may hold printable ASCII characters and tabs, and neither begin nor end with a space"
        )


def _parse_body(given: object, method: str) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str):
        raise InvalidInput(
            "target.body", "must be text (JSON as text, too), because it is sent as it is, byte for byte"
        )
    if method in ("GET", "HEAD"):
        raise InvalidInput(
            "target.body", f"has no meaning with {method} (RFC 9110); use POST, PUT, PATCH or DELETE"
        )
    if "\x00" in given:
        raise InvalidInput("target.body", "has a NUL character, which cannot be stored")
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        raise InvalidInput("target.body", "is not valid Unicode text (it has a lone surrogate)") from None
    if size > MAX_BODY_BYTES:
        raise InvalidInput("target.body", f"is {size} bytes; allowed: up to {MAX_BODY_BYTES} as UTF-8")
    return given


def _content_type_of(body: str) -> str:
    try:
        json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return "text/plain; charset=utf-8"
    return "application/json"


def _refuse_constant(name: str) -> object:
    """NaN and Infinity are Python's, not JSON's (RFC 8259, section 6)."""
    raise ValueError(name)


def _shown(name: object) -> str:
    """A name of the caller's, safe and short enough for an error text."""
    return ascii(name)[:60]
