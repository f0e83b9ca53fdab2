"""The value types of requests and pages: bounded, and strict where a lenient reading would surprise."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from app.domain.ids import EPOCH

PAGE_LIMIT = 200
PAGE_DEFAULT = 50
LATEST = datetime(9999, 12, 30, tzinfo=UTC)

_INSTANT = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d{1,6})?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)


def parse_instant(given: object) -> datetime:
    """An RFC 3339 instant with its zone, 1970 to 9999, in UTC. Raises ValueError.

    Pydantic alone would also take numbers, dates without a time, and times without a zone.
    """
    if not isinstance(given, str) or not _INSTANT.fullmatch(given):
        raise ValueError(
            "must be an RFC 3339 instant with Z or an offset, such as 2026-01-31T09:00:00Z or "
            "2026-01-31T10:00:00+01:00 (in a URL, + is written %2B)"
        )
    try:
        instant = datetime.fromisoformat(given.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("is not a date and time that exists") from None
    if not EPOCH <= instant <= LATEST:
        raise ValueError(f"must be from {EPOCH.year} to {LATEST.year}")
    return instant


_INSTANT_SCHEMA = {"type": "string", "format": "date-time", "examples": ["2026-01-31T09:00:00Z"]}

Instant = Annotated[datetime, BeforeValidator(parse_instant), WithJsonSchema(_INSTANT_SCHEMA)]
"""An instant in a request."""

Text = Annotated[str, Field(strict=True)]
"""Text in a request. That it has neither NUL nor lone surrogates is the reader's work (`app.api.reading`)."""

JsonObject = dict[str, Any]


class Body(BaseModel):
    """What a request may carry: an unknown field is a mistake, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shown(BaseModel):
    """What an answer carries."""

    model_config = ConfigDict(frozen=True)


class Paging(Body):
    """The query of every list."""

    limit: int = Field(
        PAGE_DEFAULT, ge=1, le=PAGE_LIMIT, description="How many at most; a page may hold fewer."
    )
    cursor: str | None = Field(
        None,
        max_length=200,
        description="`next_cursor` of the page before; the other parameters must be the same.",
    )


NEXT_CURSOR = Field(description="Where the next page begins; null on the last page.")

ScheduleIdInPath = Annotated[UUID, Path(description="The schedule's id.")]
RunIdInPath = Annotated[UUID, Path(description="The run's id.")]
TenantIdInPath = Annotated[UUID, Path(description="The tenant's id.")]
