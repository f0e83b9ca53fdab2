"""Reading an answer up to a bound, and making it safe to store: no NUL, no surrogates, no control
characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping

from aiohttp.streams import StreamReader

from app.domain.outcome import Answer

MAX_READ = 64 * 1024
"""Bytes of a body that are read, so that the connection can be used again; a longer answer closes it."""

MAX_EXCERPT = 4 * 1024
"""Bytes of a body that are kept."""

MAX_KEPT_HEADERS = 16
MAX_KEPT_VALUE = 512

KEPT_HEADERS = frozenset(
    {
        *("content-type", "content-length", "content-encoding", "date", "server", "location", "retry-after"),
        *(
            "allow",
            "www-authenticate",
            "ratelimit",
            "x-request-id",
            "x-correlation-id",
            "request-id",
            "cf-ray",
        ),
    }
)

# C0 except tab, line feed and carriage return, DEL, C1 and lone surrogates: PostgreSQL refuses some,
# terminals obey others.
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_DECODER = codecs.getincrementaldecoder("utf-8")


async def read_body(status: int, content: StreamReader) -> tuple[bytes, bool]:
    """The body up to its end or `MAX_READ`, and whether it ended there.

    Raises what aiohttp raises when it ends early or is malformed.
    """
    if status == 101:
        return b"", False  # an upgrade that nobody asked for: what follows is not HTTP
    body = b""
    while not content.at_eof():
        chunk = await content.readany()
        body = body + chunk if body else chunk
        if len(body) > MAX_READ:
            break
    return body, content.at_eof()


def as_answer(status: int, headers: Mapping[str, str], body: bytes, *, is_whole: bool) -> Answer:
    """What is kept of an answer."""
    return Answer(
        status=status,
        headers=_kept_headers(headers),
        excerpt=excerpt_of(body),
        truncated=not is_whole or len(body) > MAX_EXCERPT,
    )


def excerpt_of(body: bytes) -> str:
    """The first `MAX_EXCERPT` bytes as text, cut between characters; what is not UTF-8 becomes U+FFFD."""
    if not body:
        return ""
    if len(body) <= MAX_EXCERPT:
        return safe_text(body.decode("utf-8", "replace"))
    return safe_text(_DECODER("replace").decode(body[:MAX_EXCERPT], final=False))


def safe_text(text: str) -> str:
    """`text` with every character replaced that storage refuses or a terminal obeys."""
    return text if text.isprintable() else _UNSAFE.sub(_REPLACEMENT, text)


def _kept_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    kept = []
    for name, value in headers.items():
        lower = name.lower()
        if lower in KEPT_HEADERS:
            kept.append((lower, safe_text(value[:MAX_KEPT_VALUE])))
            if len(kept) == MAX_KEPT_HEADERS:
                break
    return tuple(kept)
