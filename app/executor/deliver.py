"""One attempt over HTTP: a target in, an outcome out, and never an exception for what a target does.

The engine is aiohttp's connector and parser; why, and what is done without, is told in
docs/decisions/aiohttp-for-delivery.md. The outcomes are tabled in docs/delivery.md.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter

from app.domain.address import AddressPolicy
from app.domain.outcome import Blocked, Outcome, Sent, TimedOut, Timing, judge
from app.domain.target import Target
from app.executor.deadline import Deadlines
from app.executor.deliver_errors import EXCHANGE_ERRORS, meaning_of
from app.executor.deliver_exchange import exchange
from app.executor.deliver_pool import BoundedPool, trusted_tls
from app.executor.deliver_request import Origin, Requests
from app.executor.flight import Departure, Flight
from app.executor.guard import GuardedResolver


class Deliverer:
    """The connections to all targets, one per process, and the only way to send to a target."""

    def __init__(self, policy: AddressPolicy, pool: BoundedPool, resolver: GuardedResolver) -> None:
        self._pool = pool
        self._resolver = resolver
        self._deadlines = Deadlines()
        self._requests = Requests(policy)

    async def close(self) -> None:
        """Close every connection. Deliveries still in flight end as `Unreachable`; cancel them first."""
        await self._pool.close()
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
        secrets masked. Raises ValueError for headers of the attempt that cannot be sent.
        """
        request = self._requests.compose(target, headers)
        flight.sent = sent = request.sent
        origin = request.origin
        if origin is None:
            return Blocked(request.problem or ""), sent
        departure = Departure(flight, before_send, perf_counter())
        limit = self._deadlines.within(deadline)
        try:
            with limit:
                answer = await exchange(
                    self._pool, origin, request.data, departure, is_head=target.method == "HEAD"
                )
            return judge(answer, _timing(departure)), sent
        except TimeoutError as error:
            if limit.is_expired:
                return TimedOut(flight.phase, flight.is_sent, _timing(departure)), sent
            return _meaning(error, origin, departure), sent
        except EXCHANGE_ERRORS as error:
            return _meaning(error, origin, departure), sent


def open_session(policy: AddressPolicy, *, connections: int, tls: ssl.SSLContext | None = None) -> Deliverer:
    """A `Deliverer` for up to `connections` requests at a time, in the running event loop. Close it.

    It holds up to twice as many sockets (idle ones are kept for a few seconds). `tls` defaults to
    `trusted_tls()`.
    """
    resolver = GuardedResolver(policy)
    return Deliverer(policy, BoundedPool(policy, resolver, connections, tls or trusted_tls()), resolver)


def _meaning(error: Exception, origin: Origin, departure: Departure) -> Outcome:
    return meaning_of(
        error,
        is_tls=origin.is_ssl(),
        is_sent=departure.flight.is_sent,
        timing=_timing(departure),
    )


def _timing(departure: Departure) -> Timing:
    started_at, ready_at, answered_at = departure.started_at, departure.ready_at, departure.answered_at
    return Timing(
        None if ready_at is None else timedelta(0, ready_at - started_at),
        None if answered_at is None else timedelta(0, answered_at - started_at),
        timedelta(0, perf_counter() - started_at),
    )
