"""The OpenAPI 3.1 document: what fastapi derives, plus every problem that a route can answer with.

The copy in docs/ is made by `python -m app.api.openapi > docs/openapi.json`; a test compares the two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.api.problems import KINDS, MEDIA_TYPE

TITLE = "Carillon"
CONTRACT = "1"
"""The version of the contract, which is that of the path; releases of the program come and go beneath it."""
SUMMARY = "A multi-tenant HTTP scheduler"
DESCRIPTION = (
    "Write down when and where; Carillon sends the request at every occurrence and keeps the history. Every error is "
    "an RFC 9457 problem; every list is walked by cursor."
)

_PROBLEM = {
    "title": "Problem",
    "description": "RFC 9457 problem details.",
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri-reference", "description": "What kind; can be opened."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string", "format": "uri-reference"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "pointer": {"type": "string", "format": "json-pointer", "description": "In the body."},
                    "parameter": {"type": "string", "description": "In the query or the headers."},
                    "field": {"type": "string"},
                    "detail": {"type": "string"},
                },
                "required": ["field", "detail"],
            },
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail", "instance", "request_id"],
}

STATE_VERBS = ("/pause", "/resume", "/run", "/cancel")


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`. Whoever changes it changes a contract: clients are generated from it."""
    made = get_openapi(
        title=TITLE,
        version=CONTRACT,
        summary=SUMMARY,
        description=DESCRIPTION,
        routes=app.routes,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    schemas = made["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = _PROBLEM
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path.startswith("/v1/"):
                operation["responses"].update(_problems(path, operation))
    return made


def _problems(path: str, operation: dict[str, Any]) -> dict[str, Any]:
    return {
        str(status): {
            "description": ", or: ".join(kind.title for kind in KINDS.values() if kind.status == status),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(_statuses(path, operation))
    }


def _statuses(path: str, operation: dict[str, Any]) -> Iterator[int]:
    yield from (401, 500, 503)
    if not path.startswith("/v1/tenants"):
        yield 403
    if "{" in path:
        yield 404
    if path.endswith(STATE_VERBS):
        yield 409
    if any(parameter["in"] == "header" for parameter in operation.get("parameters", ())):
        yield 412
    if "requestBody" in operation or path.endswith(STATE_VERBS):  # which refuse a body, and so read it
        yield from (400, 408, 413, 415, 422)
    if any(parameter["in"] == "query" for parameter in operation.get("parameters", ())):
        yield 422


def render(app: FastAPI) -> str:
    """The text of docs/openapi.json."""
    return json.dumps(document(app), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    from app.api.app import blank_app

    sys.stdout.write(render(blank_app()))
