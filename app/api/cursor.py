"""Where a walk through pages stands, as opaque text. Every page is found by key, so the place is a key.

The text is base64url of a fixed layout: a digest that binds the cursor to its tenant, collection and
filters, then the last row's instant in whole microseconds and its 16-byte id, then the window of the walk
(so that "the last 7 days" stay the same days on every page). It is not signed: the tenant comes from the
key, never from here, and a forged place is only another place in the caller's own data.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlencode
from uuid import UUID

from fastapi import Request, Response

from app.api.problems import query_problem
from app.api.values import LATEST
from app.domain.ids import EPOCH, microseconds

NO_ID = UUID(int=0)
_LAYOUT = struct.Struct(">8sq16sqq")
CURSOR_FAULT = "is not a cursor of this list with these filters; leave it out to begin anew"


@dataclass(frozen=True, slots=True)
class Binding:
    """What a cursor belongs to: never valid for another tenant, list or filter."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Mark:
    """A place: the last row's instant and id, and the window [from_at, to_at) of the walk."""

    at: datetime = EPOCH
    id: UUID = NO_ID
    from_at: datetime = EPOCH
    to_at: datetime = EPOCH


def binding_of(request: Request, owner: UUID | None) -> Binding:
    """The binding of this request's list: its owner, its path and its query, apart from `cursor` and `limit`."""
    query = [pair for pair in request.query_params.multi_items() if pair[0] not in _FREE]
    return bind(owner, request.url.path, query)


def bind(owner: UUID | None, path: str, query: Sequence[tuple[str, str]]) -> Binding:
    """The order of the query's parameters does not matter."""
    text = json.dumps([str(owner), path, sorted(query)])
    return Binding(hashlib.sha256(text.encode()).digest()[:8])


_FREE = ("cursor", "limit")


def write(mark: Mark, binding: Binding) -> str:
    packed = _LAYOUT.pack(
        binding.digest,
        microseconds(mark.at),
        mark.id.bytes,
        microseconds(mark.from_at),
        microseconds(mark.to_at),
    )
    return base64.urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def read(text: str, binding: Binding) -> Mark:
    """The place that `write` wrote for the same list. Raises ProblemError (422) for any other text."""
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        digest, at, id_bytes, from_at, to_at = _LAYOUT.unpack(packed)
        mark = Mark(_instant(at), UUID(bytes=id_bytes), _instant(from_at), _instant(to_at))
    except (binascii.Error, ValueError, struct.error, OverflowError):
        raise query_problem("cursor", CURSOR_FAULT) from None
    if digest != binding.digest:
        raise query_problem("cursor", CURSOR_FAULT)
    return mark


def link_next(request: Request, response: Response, cursor: str | None) -> None:
    """Name the next page in a Link header too (RFC 8288)."""
    if cursor is not None:
        query = [pair for pair in request.query_params.multi_items() if pair[0] != "cursor"]
        response.headers["Link"] = (
            f'<{request.url.path}?{urlencode([*query, ("cursor", cursor)])}>; rel="next"'
        )


def _instant(micros: int) -> datetime:
    instant = EPOCH + timedelta(microseconds=micros)
    if not EPOCH <= instant <= LATEST:
        raise ValueError(micros)
    return instant
