"""Every answer that is not a success: RFC 9457 problem details, one table of kinds, one way to make them.

    {"type": "/problems/invalid-input", "title": "…", "status": 422, "detail": "…", "instance":
    "/v1/schedules",
     "errors": [{"pointer": "/target/url", "field": "target.url", "detail": "…"}], "request_id": "…"}

`type` is a relative reference that this API serves itself (`GET /problems/{slug}`). A faulty query
parameter is named by `parameter` instead of `pointer`. Nothing here repeats a header, a key or a driver's
text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException

from app.errors import (
    CarillonError,
    Conflict,
    InvalidInput,
    NotFound,
    PartitionMissing,
    RowRefused,
    StoreUnavailable,
)

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_SOON_SECONDS = 1
RETRY_PARTITION_SECONDS = 15
FAULTS_SHOWN = 20
SHOWN_FIELD_CHARACTERS = 150
"""The longest field that can be right is `target.headers.` with a name of 128 characters."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem. `meaning` is what its page says: what happened, and what to do."""

    slug: str
    status: int
    title: str
    meaning: str


KINDS: Mapping[str, Kind] = {
    kind.slug: kind
    for kind in (
        Kind(
            "malformed-request",
            400,
            "The request cannot be read",
            "The body is not one JSON document: a syntax error, a duplicate key, NaN or Infinity, bytes that are "
            "not UTF-8; or a number, a nesting, or how many values or parameters there are is beyond the limits. "
            "The detail says which and where.",
        ),
        Kind(
            "unauthenticated",
            401,
            "A valid API key is needed",
            "Send `Authorization: Bearer <key>` with a key of this tenant that is neither expired nor "
            "revoked. "
            "Tenant and key administration needs the administrator's key, everything else a tenant's key. "
            "The answer is the same for every reason why a key is not valid.",
        ),
        Kind(
            "forbidden",
            403,
            "The key may not do this",
            "The key is valid, but its scopes do not cover the operation: reading needs `read`, changing "
            "`write`.",
        ),
        Kind(
            "not-found",
            404,
            "There is nothing here",
            "The path or the id is unknown. What belongs to another tenant is unknown too.",
        ),
        Kind(
            "method-not-allowed",
            405,
            "The method does not exist here",
            "The path exists, the method does not. The Allow header lists those that do.",
        ),
        Kind(
            "body-timeout",
            408,
            "The body did not arrive in time",
            "The connection was too slow for the body. Send the request again.",
        ),
        Kind(
            "conflict",
            409,
            "The present state does not allow this",
            "The request contradicts the state of what it names, or a change made at the same moment. "
            "Read it again, then decide anew.",
        ),
        Kind(
            "precondition-failed",
            412,
            "It has been changed meanwhile",
            "If-Match names another version than the present one. Read the schedule again, then decide anew.",
        ),
        Kind(
            "body-too-large",
            413,
            "The body is too large",
            "The body exceeds the limit of this installation (SCHEDULER_API_MAX_BODY_BYTES).",
        ),
        Kind(
            "unsupported-media-type",
            415,
            "The body is not JSON",
            "Send `Content-Type: application/json`, in UTF-8 and without a content coding.",
        ),
        Kind(
            "invalid-input",
            422,
            "A value is outside what is allowed",
            "The request can be read, but a value in it is not allowed. `errors` lists the faults that were "
            "found: where each is (`pointer` into the body, or `parameter` of the query) and what is allowed. "
            "Fields that are unknown, missing or of the wrong type are looked for first; only without them "
            "are recurrence, target and retry read, and of each of these the first fault is named. Nothing "
            "was changed.",
        ),
        Kind(
            "internal-error",
            500,
            "Carillon has failed",
            "This is a fault of ours. It is logged under the request_id; please report it with that id.",
        ),
        Kind(
            "unavailable",
            503,
            "The database does not answer",
            "Nothing is known to be wrong with the request. Send it again after the time in Retry-After; a "
            "change "
            "may or may not have happened, so read before you repeat one.",
        ),
        Kind(
            "partition-missing",
            503,
            "The month is being prepared",
            "The storage for this month does not exist yet. Maintenance makes it within a minute or so; "
            "send the request again after the time in Retry-After. Nothing was changed.",
        ),
    )
}

_BY_STATUS = {kind.status: kind.slug for kind in reversed(list(KINDS.values()))}


@dataclass(frozen=True, slots=True)
class Fault:
    """One faulty value: `field` as dotted path; `place` is where the request holds it (`body` or `query`).

    A field may be the caller's own text, of any length: it is cut here, where every fault passes.
    """

    field: str
    detail: str
    place: str = "body"

    def __post_init__(self) -> None:
        if len(self.field) > SHOWN_FIELD_CHARACTERS:
            object.__setattr__(self, "field", self.field[:SHOWN_FIELD_CHARACTERS] + "…")

    def to_json(self) -> dict[str, str]:
        if self.place != "body":
            return {"parameter": self.field, "field": self.field, "detail": self.detail}
        return {
            "pointer": pointer_of(self.field.split(".") if self.field else ()),
            "field": self.field,
            "detail": self.detail,
        }


class ProblemError(HTTPException):
    """Raised by the API itself to answer with a problem. An HTTPException so that fastapi lets it through."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        faults: Iterable[Fault] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(KINDS[slug].status, detail, dict(headers or {}))
        self.slug = slug
        self.faults = tuple(faults)


def query_problem(parameter: str, detail: str) -> ProblemError:
    """A faulty query parameter."""
    return ProblemError("invalid-input", f"{parameter}: {detail}", faults=[Fault(parameter, detail, "query")])


def pointer_of(path: Sequence[str]) -> str:
    """The JSON Pointer (RFC 6901) of a path; the empty path is the whole document."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def problem(
    request: Request,
    slug: str,
    detail: str,
    *,
    faults: Iterable[Fault] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer itself. ASCII JSON, so that no text can break it. Of many faults it shows the first ones."""
    kind = KINDS[slug]
    shown = list(islice(faults, FAULTS_SHOWN + 1))
    if len(shown) > FAULTS_SHOWN:
        shown.pop()
        detail = f"{detail}; errors has the first {FAULTS_SHOWN} faults, there are more"
    body: dict[str, Any] = {
        "type": f"/problems/{kind.slug}",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        "instance": request.url.path[:200],
    }
    if shown:
        body["errors"] = [fault.to_json() for fault in shown]
    body["request_id"] = request.state.request_id
    return Response(json.dumps(body).encode("ascii"), kind.status, dict(headers or {}), MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Teach the application to answer every error with a problem (unexpected ones: see `app.api.edge`)."""
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(CarillonError, _of_ours)


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ProblemError):
        return problem(request, error.slug, error.detail, faults=error.faults, headers=error.headers)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods_of(request))
        return problem(request, "method-not-allowed", f"allowed here: {allowed}", headers={"Allow": allowed})
    slug = _BY_STATUS.get(error.status_code, "malformed-request")
    return problem(request, slug, KINDS[slug].title, headers=error.headers)


def _methods_of(request: Request) -> list[str]:
    """All methods of the path; the router itself names only those of the first route that fits it."""
    path = request.scope["path"]
    methods: set[str] = set()
    for context in iter_route_contexts(request.app.routes):
        if context.path_regex.match(path):
            methods |= context.methods or set()
    return sorted(methods)


def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(fault["loc"][0] == "path" for fault in found):
        return not_found(request)
    faults = [_fault(fault) for fault in found[: FAULTS_SHOWN + 1]]
    return problem(request, "invalid-input", _summary(faults), faults=faults)


def _fault(found: Mapping[str, Any]) -> Fault:
    place, *path = found["loc"]
    if place != "body":
        path = path[:1]  # of a parameter that may be repeated, not which repetition
    return Fault(".".join(str(part) for part in path), _plain(found, place), place)


def _plain(found: Mapping[str, Any], place: str) -> str:
    """What pydantic found, in our words; its own, cleaned, for what the table does not know."""
    kind = found["type"]
    if kind == "extra_forbidden":
        return "there is no such field" if place == "body" else "there is no such parameter"
    if kind in _PLAINER:
        return _PLAINER[kind].format_map(found.get("ctx", {}))
    text: str = found["msg"]
    return text.removeprefix("Value error, ").replace("Input should be", "must be")


_PLAINER = {
    "missing": "is required",
    "model_attributes_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "list_type": "must be a list",
    "frozen_set_type": "must be a list",
    "too_short": "must have at least {min_length} of them",
    "too_long": "must have at most {max_length} of them",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "greater_than_equal": "must be at least {ge:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
    "enum": "must be {expected}",
    "uuid_type": "must be a UUID, as text",
    "uuid_parsing": "must be a UUID",
}


def _summary(faults: Sequence[Fault]) -> str:
    first = faults[0]
    text = f"{first.field or 'the body'}: {first.detail}"
    if len(faults) == 1 or len(faults) > FAULTS_SHOWN:
        return text
    return f"{text} (and {len(faults) - 1} more, see errors)"


def not_found(request: Request) -> Response:
    """The one answer to whatever does not exist for this caller."""
    return problem(request, "not-found", "there is nothing with this id")


def _of_ours(request: Request, error: Exception) -> Response:
    match error:
        case NotFound():
            return not_found(request)
        case InvalidInput():
            fault = Fault(error.field, error.problem)
            return problem(request, "invalid-input", _summary([fault]), faults=[fault])
        case Conflict():
            return problem(request, "conflict", str(error))
        case PartitionMissing():
            return _again(request, "partition-missing", RETRY_PARTITION_SECONDS)
        case StoreUnavailable():
            logger.warning(
                "api.store_unavailable", extra={"request_id": request.state.request_id, "why": str(error)}
            )
            return _again(request, "unavailable", RETRY_SOON_SECONDS)
        case RowRefused():
            logger.error("api.row_refused", extra={"request_id": request.state.request_id, "why": str(error)})
            return problem(request, "invalid-input", "the database refuses a value of this request")
        case _:
            raise error


def _again(request: Request, slug: str, seconds: int) -> Response:
    return problem(request, slug, KINDS[slug].meaning, headers={"Retry-After": str(seconds)})
