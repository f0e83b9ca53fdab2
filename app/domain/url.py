"""A target's URL: read once, strictly, into one normal spelling, so that create, guard and send see the same
host.

The URL is kept as people wrote it where that means something (path, query, port) and normalised where
spellings could differ between us and a resolver: lower-case ASCII host (IDNA with UTS 46 mapping), canonical
literals, no trailing dot. Numeric spellings that C libraries take for addresses (`0x7f.1`, `2130706433`,
`127.1`, full-width digits) are refused or normalised here and never reach a resolver as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote

import idna

MAX_URL = 2048
"""Characters, after normalisation."""

DEFAULT_PORTS = {"http": 80, "https": 443}

_PARTS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<path>[^?]*)(?P<query>\?.*)?"
)
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\x9f\\]")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
# RFC 3986 pchar, the percent sign of what is encoded already, and the brackets that everybody uses in
# queries.
_PATH_SAFE = "/:@!$&'()*+,;=~%"
_QUERY_SAFE = _PATH_SAFE + "?[]"


@dataclass(frozen=True, slots=True)
class Url:
    """A normalised http or https URL. `host` is ASCII, IPv6 without brackets; `path` starts with `/` and has
    the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        """`scheme://host:port`, the port always written: the key of breakers and caps."""
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        suffix = "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{bracketed(self.host)}{suffix}{self.path}"


def bracketed(host: str) -> str:
    """`host` as an authority spells it: IPv6 literals in brackets."""
    return f"[{host}]" if ":" in host else host


@lru_cache(maxsize=4096)
def parse_url(text: str) -> Url:
    """Read `text`. Raises ValueError with a sentence for people, which never repeats the URL (it may hold
    secrets)."""
    if len(text) > MAX_URL:
        raise ValueError(f"is longer than {MAX_URL} characters")
    if _FORBIDDEN.search(text):
        raise ValueError("has a space, a control character or a backslash; percent-encode what belongs there")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode text (it has a lone surrogate)") from None
    if "#" in text:
        raise ValueError("has a fragment (#…), which is never sent to a server; leave it out")
    parts = _PARTS.fullmatch(text)
    if parts is None:
        raise ValueError("is not an absolute URL such as https://example.com/path")
    scheme = parts["scheme"].lower()
    if scheme not in DEFAULT_PORTS:
        raise ValueError("has an unsupported scheme; allowed: http and https")
    host, port = _authority(parts["authority"], scheme)
    if _STRAY_PERCENT.search(parts["path"] + (parts["query"] or "")):
        raise ValueError(
            "has a % that is not followed by two hexadecimal digits; write %25 for a percent sign"
        )
    path = quote(parts["path"] or "/", safe=_PATH_SAFE) + quote(parts["query"] or "", safe=_QUERY_SAFE)
    url = Url(scheme=scheme, host=host, port=port, path=path)
    if len(str(url)) > MAX_URL:
        raise ValueError(f"is longer than {MAX_URL} characters once percent-encoded")
    return url


def _authority(authority: str, scheme: str) -> tuple[str, int]:
    if "@" in authority:
        raise ValueError("has a user name or password; use an Authorization header instead")
    if authority.startswith("["):
        literal, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("has an IPv6 address without matching brackets")
        host, port = _ipv6(literal), rest[1:] if rest else None
    else:
        name, colon, rest = authority.partition(":")
        host, port = normal_host(name), rest if colon else None
    if port is None:
        return host, DEFAULT_PORTS[scheme]
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ValueError("has an impossible port; allowed: 1 to 65535")
    return host, int(port)


def normal_host(text: str) -> str:
    """A host (a name, an IPv4 address, or an IPv6 address without brackets) in its one normal spelling.

    Raises ValueError with a sentence for people.
    """
    if not text:
        raise ValueError("has no host")
    if ":" in text:
        return _ipv6(text)
    if text.isascii():
        host = text.lower()
    else:
        try:
            host = idna.encode(text, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError):
            raise ValueError("has a host that is not a valid internationalised domain name") from None
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("has a host that is not a valid domain name or address")
    # What ends in a number is an IPv4 address (https://url.spec.whatwg.org/#ends-in-a-number-checker).
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise ValueError(
                "has an IPv4 address in an unusual spelling; write four decimal numbers"
            ) from None
    return host


def _ipv6(literal: str) -> str:
    if "%" in literal:
        raise ValueError("has an IPv6 address with a zone id, which means nothing to another machine")
    try:
        return str(IPv6Address(literal))
    except ValueError:
        raise ValueError("has an invalid IPv6 address") from None
