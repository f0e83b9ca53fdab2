"""Who is asking. Authentication comes before anything of the request is read, so a stranger learns nothing.

Three kinds of route, each a route class, so that no route exists without a decision: `ReadRoute` and
`WriteRoute` need a tenant's key with that scope, `AdminRoute` the administrator's. Neither kind of key
opens the other's routes. Every refusal of a key by one route is the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from app.api.deps import ApiDeps, deps_of
from app.api.problems import ProblemError
from app.api.reading import StrictRequest
from app.domain import api_key
from app.domain.api_key import Scope
from app.domain.ids import TenantId
from app.store import keys
from app.store.pool import acquire

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

TENANT_KEY_NEEDED = (
    "a valid API key of a tenant is needed here: Authorization: Bearer ck_<id>_<secret> "
    "(the administrator's key opens only /v1/tenants)"
)
ADMIN_KEY_NEEDED = (
    "the administrator's key is needed here: Authorization: Bearer <SCHEDULER_API_ADMIN_KEY> "
    "(a tenant's key, ck_…, opens everything but /v1/tenants)"
)
"""Which of the two depends on the route alone, so neither tells anything about the key that was sent."""

NO_DIGEST = bytes(32)
"""Compared with when there is no such key, so that both refusals do the same work."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A genuine key, and whose it is."""

    tenant_id: TenantId
    key_id: str
    scopes: frozenset[Scope]


class TenantRoute(APIRoute):
    """A route of one tenant's data: the caller's key says which. Its subclasses say what the key must
    allow.
    """

    scope_needed: ClassVar[Scope]

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def authenticated(request: Request) -> Response:
            caller = await _authenticate(request)
            request.state.caller = caller
            if self.scope_needed not in caller.scopes:
                raise ProblemError("forbidden", f"this key lacks the scope {self.scope_needed}")
            strict = StrictRequest(request.scope, request.receive)
            if request.method == "GET":
                return await _until_disconnect(strict, answer)
            return await answer(strict)

        return authenticated


class ReadRoute(TenantRoute):
    scope_needed = Scope.READ


class WriteRoute(TenantRoute):
    scope_needed = Scope.WRITE


class AdminRoute(APIRoute):
    """A route of the installation's administrator."""

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def authenticated(request: Request) -> Response:
            if not _is_admin(deps_of(request), _presented(request)):
                raise _refusal(ADMIN_KEY_NEEDED)
            return await answer(StrictRequest(request.scope, request.receive))

        return authenticated


tenant_key = HTTPBearer(scheme_name="tenant key", bearerFormat="ck_<id>_<secret>", auto_error=False)
admin_key = HTTPBearer(scheme_name="administrator key", auto_error=False)
"""For the OpenAPI document alone: the route classes above decide."""


def _caller(request: Request, _documented: Annotated[object, Depends(tenant_key)]) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


CurrentCaller = Annotated[Caller, Depends(_caller)]


async def _authenticate(request: Request) -> Caller:
    """The caller. One indexed read, no cache: a revoked key ends at once. Raises ProblemError (401)."""
    presented = api_key.read(_presented(request))
    if presented is None:
        raise _refusal(TENANT_KEY_NEEDED)
    async with acquire(deps_of(request).pool) as conn:
        stored = await keys.find(conn, presented.id)
    if not api_key.is_genuine(presented, stored.secret_sha256 if stored else NO_DIGEST) or stored is None:
        raise _refusal(TENANT_KEY_NEEDED)
    return Caller(stored.tenant_id, presented.id, stored.scopes)


def _presented(request: Request) -> str:
    """The bearer token; empty when there is none, or more than one Authorization header."""
    given = request.headers.getlist("authorization")
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is_admin(deps: ApiDeps, token: str) -> bool:
    """Digests, not texts: equal lengths, bytes in any case, and constant time."""
    key = deps.settings.key
    if key is None:
        return False
    wanted, given = (
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        for text in (key.get_secret_value(), token)
    )
    return hmac.compare_digest(wanted, given)


def _refusal(needed: str) -> ProblemError:
    return ProblemError(
        "unauthenticated",
        needed,
        headers={"WWW-Authenticate": 'Bearer realm="carillon"'},
    )


async def _until_disconnect(request: Request, answer: Handler) -> Response:
    """The answer to a request without a body; given up, its database query included, when the caller hangs
    up.
    """
    work = asyncio.ensure_future(answer(request))
    gone = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return Response(status_code=499)
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
