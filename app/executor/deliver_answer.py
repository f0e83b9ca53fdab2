"""Reading an answer up to a bound, and making it safe to store: no NUL, no surrogates, no control
characters."""

from __future__ import annotations

import codecs
import re

from aiohttp.client_reqrep import ClientResponse

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


async def read_answer(response: ClientResponse) -> Answer:
    """The answer with its body read to the end or up to `MAX_READ`, and the connection given back or closed.

    Raises what aiohttp raises when the body ends early or is malformed.
    """
    body = b""
    try:
        if response.status == 101:
            is_whole = False  # an upgrade that nobody asked for: what follows is not HTTP
        else:
            while chunk := await response.content.readany():
                body = body + chunk if body else chunk
                if len(body) > MAX_READ:
                    break
            is_whole = response.content.at_eof()
    except BaseException:
        response.close()
        raise
    response.release()  # closes the connection where the answer has not ended
    return Answer(
        status=response.status,
        headers=_kept_headers(response),
        excerpt=excerpt_of(body),
        truncated=not is_whole or len(body) > MAX_EXCERPT,
    )


def excerpt_of(body: bytes) -> str:
    """The first `MAX_EXCERPT` bytes as text, cut between characters; what is not UTF-8 becomes U+FFFD."""
    if not body:
        return ""
    text = _DECODER("replace").decode(body[:MAX_EXCERPT], final=len(body) <= MAX_EXCERPT)
    return safe_text(text)


def safe_text(text: str) -> str:
    """`text` with every character replaced that storage refuses or a terminal obeys."""
    return _UNSAFE.sub(_REPLACEMENT, text)


def _kept_headers(response: ClientResponse) -> tuple[tuple[str, str], ...]:
    kept = []
    for name, value in response.headers.items():
        lower = name.lower()
        if lower in KEPT_HEADERS:
            kept.append((lower, safe_text(value[:MAX_KEPT_VALUE])))
            if len(kept) == MAX_KEPT_HEADERS:
                break
    return tuple(kept)
