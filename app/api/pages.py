"""What a person opens in a browser: the reference, and one page per kind of problem.

Rendered here, without a script and without anything from elsewhere: it works in a closed network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, PlainTextResponse

from app.api.problems import KINDS, ProblemError

router = APIRouter(include_in_schema=False)

_SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Frame-Options": "DENY",
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "h2 code{font-size:.95em}pre{background:#8881;padding:1em;overflow:auto}section{border-top:1px solid #8886}"
    "td,th{text-align:left;padding:.2em 1em .2em 0;vertical-align:top}:root{color-scheme:light dark}"
)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The reference, from the same OpenAPI document that /openapi.json serves."""
    return HTMLResponse("".join(_reference(request.app.openapi())), headers=_SAFE)


@router.get("/problems")
async def list_problems() -> PlainTextResponse:
    lines = [f"/problems/{kind.slug}  {kind.status}  {kind.title}\n" for kind in KINDS.values()]
    return PlainTextResponse("".join(lines))


@router.get("/problems/{slug}")
async def explain_problem(slug: str) -> PlainTextResponse:
    kind = KINDS.get(slug)
    if kind is None:
        raise ProblemError("not-found", "there is no such kind of problem")
    return PlainTextResponse(f"{kind.title} (HTTP {kind.status})\n\n{kind.meaning}\n")


def _reference(document: dict[str, Any]) -> Iterator[str]:
    title = escape(document["info"]["title"])
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"<h1>{title}</h1><p>{escape(document['info']['description'])}</p>"
    yield '<p>For machines: <a href="/openapi.json">OpenAPI 3.1</a>. Errors: <a href="/problems">kinds</a>.</p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield from _operation(path, method, operation)
    yield "<section><h2>Shapes</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><pre>{escape(json.dumps(schema, indent=2))}</pre>'
    yield "</section></html>"


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    if parameters := operation.get("parameters"):
        yield "<table>"
        for parameter in parameters:
            text = escape(parameter.get("description", ""))
            yield f"<tr><td><code>{escape(parameter['name'])}</code><td>{parameter['in']}<td>{text}</tr>"
        yield "</table>"
    if body := operation.get("requestBody"):
        yield f"<p>Body: {_shape(body)}</p>"
    good = {status: answer for status, answer in operation["responses"].items() if status < "300"}
    for status, answer in good.items():
        yield f"<p>{status}: {_shape(answer)}</p>"
    bad = ", ".join(status for status in operation["responses"] if status >= "300")
    yield f"<p>Problems: {bad}</p></section>"


def _shape(carrier: dict[str, Any]) -> str:
    schema = carrier.get("content", {}).get("application/json", {}).get("schema", {})
    references = [schema, *schema.get("anyOf", ())]
    names = [part["$ref"].rpartition("/")[2] for part in references if "$ref" in part]
    return " or ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names) or "nothing, or any"
