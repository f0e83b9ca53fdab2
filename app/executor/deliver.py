"""One attempt over HTTP: a target in, an outcome out, and never an exception for what a target does.

The engine is aiohttp; why, and what is switched off in it, is told in docs/decisions/aiohttp-for-delivery.md.
The outcomes are tabled in docs/delivery.md.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib.metadata import version
from time import perf_counter

import aiohttp
from aiohttp.client_reqrep import ClientResponse
from multidict import CIMultiDict
from yarl import URL

from app.domain.address import AddressPolicy
from app.domain.outcome import Blocked, Outcome, Sent, TimedOut, Timing, judge
from app.domain.target import Target, masked, url_problem
from app.executor.deadline import Deadlines
from app.executor.deliver_answer import read_answer
from app.executor.deliver_errors import meaning_of
from app.executor.deliver_pool import StaleConnection, open_engine, trusted_tls
from app.executor.flight import DEPARTURE, Departure, Flight
from app.executor.guard import GuardedResolver

USER_AGENT = f"Carillon/{version('carillon')}"
PREPARED_TARGETS = 4096
UNTYPED = "application/octet-stream"
"""The Content-Type of a body whose owner named none (RFC 9110, section 8.3)."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What every request to one target shares: all but its body and the headers of the attempt."""

    url: URL
    headers: CIMultiDict[str]
    shown_headers: tuple[tuple[str, str], ...]
    problem: str | None


class Deliverer:
    """The connections to all targets, one per process, and the only way to send to a target."""

    def __init__(
        self, policy: AddressPolicy, engine: aiohttp.ClientSession, resolver: GuardedResolver
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._resolver = resolver
        self._deadlines = Deadlines()
        self._prepare = lru_cache(maxsize=PREPARED_TARGETS)(self._prepare_anew)

    async def close(self) -> None:
        """Close every connection. Deliveries still in flight end as `Unreachable`; cancel them first."""
        await self._engine.close()
        await self._resolver.close()
        self._deadlines.close()

    async def deliver(
        self,
        target: Target,
        *,
        headers: Sequence[tuple[str, str]],
        deadline: timedelta,
        before_send: Callable[[], None],
        flight: Flight,
    ) -> tuple[Outcome, Sent]:
        """Send one request and read its answer, all within `deadline`, from name look-up to last byte.

        `headers` are the attempt's own (identity, signature, trace) and win over the target's. `before_send`
        is called once the connection is ready, right before the first byte is handed over; what it raises
        (LeaseLost) comes out of here, and nothing was sent. `flight` tells at any time whether the request
        may have left: read it when this call was cancelled. `Sent` is what was or would have been sent, its
        secrets masked.
        """
        prepared = self._prepare(target.url, target.headers, UNTYPED if target.body else None)
        body = target.body.encode() if target.body else None
        sent = Sent(
            method=target.method,
            url=target.url,
            headers=prepared.shown_headers + tuple((name, masked(name, value)) for name, value in headers),
            body_bytes=len(body) if body else 0,
        )
        flight.sent = sent
        if prepared.problem is not None:
            return Blocked(prepared.problem), sent
        outgoing = prepared.headers.copy()
        outgoing.update(headers)
        departure = Departure(flight, before_send, perf_counter())
        limit = self._deadlines.within(deadline)
        token = DEPARTURE.set(departure)
        try:
            with limit:
                response = await self._request(target.method, prepared.url, outgoing, body)
                departure.answer()
                answer = await read_answer(response)
            return judge(answer, _timing(departure)), sent
        except TimeoutError as error:
            if limit.is_expired:
                return TimedOut(flight.phase, flight.is_sent, _timing(departure)), sent
            return self._meaning(error, prepared, departure), sent
        except (aiohttp.ClientError, OSError) as error:
            return self._meaning(error, prepared, departure), sent
        finally:
            DEPARTURE.reset(token)

    async def _request(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes | None
    ) -> ClientResponse:
        """The answer's head. A kept connection that turned out unusable before anything was sent is replaced
        once."""
        try:
            return await self._engine.request(method, url, headers=headers, data=body, allow_redirects=False)
        except StaleConnection:
            return await self._engine.request(method, url, headers=headers, data=body, allow_redirects=False)

    def _meaning(
        self, error: aiohttp.ClientError | OSError, prepared: _Prepared, departure: Departure
    ) -> Outcome:
        return meaning_of(
            error,
            scheme=prepared.url.scheme,
            is_sent=departure.flight.is_sent,
            timing=_timing(departure),
        )

    def _prepare_anew(
        self, url: str, given: tuple[tuple[str, str], ...], content_type: str | None
    ) -> _Prepared:
        headers = CIMultiDict({"User-Agent": USER_AGENT, "Accept": "*/*"})
        if content_type is not None:
            headers["Content-Type"] = content_type
        headers.update(given)
        headers["Accept-Encoding"] = "identity"
        problem = url_problem(url, self._policy)
        return _Prepared(
            url=URL() if problem else URL(url, encoded=True),
            headers=headers,
            shown_headers=tuple((str(name), masked(name, value)) for name, value in headers.items()),
            problem=problem,
        )


def open_session(policy: AddressPolicy, *, connections: int, tls: ssl.SSLContext | None = None) -> Deliverer:
    """A `Deliverer` for up to `connections` requests at a time, in the running event loop. Close it.

    It holds up to twice as many sockets (idle ones are kept for a few seconds). `tls` defaults to
    `trusted_tls()`.
    """
    resolver = GuardedResolver(policy)
    engine = open_engine(policy, resolver, connections=connections, tls=tls or trusted_tls())
    return Deliverer(policy, engine, resolver)


def _timing(departure: Departure) -> Timing:
    started_at = departure.started_at
    return Timing(
        connect=_since(started_at, departure.ready_at),
        first_byte=_since(started_at, departure.answered_at),
        total=timedelta(seconds=perf_counter() - started_at),
    )


def _since(started_at: float, at: float | None) -> timedelta | None:
    return None if at is None else timedelta(seconds=at - started_at)
