"""The outer edge of every request: its id, its log line, and the answer when something unforeseen is
raised.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import metrics
from app.api.problems import problem

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset({"/livez", "/readyz", "/metrics"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")


class Edge:
    """ASGI middleware. Takes over a caller's `X-Request-Id` when it is harmless, and returns the id in any
    case.

    The log line has the path without its query and no header: keys never reach a log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if _REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        began = time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except Exception:
            logger.exception("api.failed", extra={"request_id": request_id, "path": scope["path"][:200]})
            if status:  # the answer has begun: all that is left is to break it off
                raise
            answer = problem(Request(scope), "internal-error", "this is a fault of ours; it is logged")
            await answer(scope, receive, send_marked)
        finally:
            seconds = time.monotonic() - began
            metrics.note_request(scope["method"], status, seconds)
            if scope["path"] not in QUIET_PATHS:
                _log(scope, status, seconds)


def _log(scope: Scope, status: int, seconds: float) -> None:
    caller = scope["state"].get("caller")
    logger.info(
        "api.request",
        extra={
            "request_id": scope["state"]["request_id"],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "ms": round(seconds * 1000, 1),
            "key_id": caller.key_id if caller else None,
        },
    )
