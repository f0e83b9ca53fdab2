"""JSON Schema of the parts of a schedule, for the OpenAPI document alone.

What is really accepted is decided by the domain's `parse` functions, whose refusals name the field; two
validators would disagree one day. A test holds these shapes against them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import WithJsonSchema

from app.api.values import JsonObject
from app.domain.run import MAX_ATTEMPTS
from app.domain.target import MAX_BODY_BYTES, MAX_HEADERS, METHODS

_INSTANT = {"type": "string", "format": "date-time"}

_CRON = {
    "type": "object",
    "title": "Cron",
    "description": "By a cron expression of five fields, or a macro such as @hourly, on the clocks of a time zone.",
    "properties": {
        "kind": {"const": "cron"},
        "cron": {"type": "string", "maxLength": 256, "examples": ["*/5 * * * *", "H 3 * * MON-FRI"]},
        "timezone": {"type": "string", "description": "IANA name.", "default": "UTC"},
    },
    "required": ["kind", "cron"],
    "additionalProperties": False,
}
_EVERY = {
    "type": "object",
    "title": "Every",
    "description": "At anchor + k × every_seconds, k = 0, 1, 2 …; elapsed time, not wall time.",
    "properties": {
        "kind": {"const": "every"},
        "every_seconds": {"type": "number", "minimum": 1, "maximum": 31_622_400, "multipleOf": 0.001},
        "anchor": {**_INSTANT, "description": "The moment of creation when left out."},
    },
    "required": ["kind", "every_seconds"],
    "additionalProperties": False,
}
_ONCE = {
    "type": "object",
    "title": "Once",
    "description": "At one instant of the future, on a whole millisecond.",
    "properties": {"kind": {"const": "once"}, "at": _INSTANT},
    "required": ["kind", "at"],
    "additionalProperties": False,
}
_TARGET = {
    "type": "object",
    "title": "Target",
    "description": "The request that is sent at every occurrence.",
    "properties": {
        "method": {"enum": list(METHODS), "default": "POST"},
        "url": {"type": "string", "format": "uri", "maxLength": 2048},
        "headers": {
            "type": "object",
            "maxProperties": MAX_HEADERS,
            "additionalProperties": {"type": "string"},
            "description": "In answers, the values of headers that carry secrets are [redacted].",
        },
        "body": {
            "type": ["string", "null"],
            "description": f"Sent as it is, in UTF-8; at most {MAX_BODY_BYTES} bytes.",
        },
    },
    "required": ["url"],
    "additionalProperties": False,
}
_RETRY = {
    "type": "object",
    "title": "Retry",
    "description": "Before attempt n + 1, a random time up to min(cap, base × factor^(n-1)) passes.",
    "properties": {
        "max_attempts": {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPTS, "default": 5},
        "base_seconds": {"type": "number", "minimum": 1, "maximum": 86_400, "default": 10},
        "factor": {"type": "number", "minimum": 1, "maximum": 10, "default": 2},
        "cap_seconds": {"type": "number", "minimum": 1, "maximum": 86_400, "default": 3600},
    },
    "additionalProperties": False,
}

RecurrenceJson = Annotated[
    JsonObject, WithJsonSchema({"title": "Recurrence", "oneOf": [_CRON, _EVERY, _ONCE]})
]
TargetJson = Annotated[JsonObject, WithJsonSchema(_TARGET)]
RetryJson = Annotated[JsonObject, WithJsonSchema(_RETRY)]
