"""Everything an attempt works with: real keeper and settler, and a deliverer that does what a test tells it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from app.claim.keeper import LeaseKeeper
from app.domain.outcome import Answer, Delivered, Outcome, Rejected, Sent, Timing
from app.domain.target import Target
from app.executor.attempt import Desk
from app.executor.deliver import Deliverer
from app.executor.flight import Flight
from app.executor.settler import Settler
from app.store.pool import Pool, connect
from tests.factories_runs import TTL

MS = timedelta(milliseconds=1)


@dataclass(slots=True)
class Call:
    """One delivery: what was asked for, and the two steps that a test decides about."""

    target: Target
    headers: dict[str, str]
    deadline: timedelta
    flight: Flight
    _before_send: Callable[[], None]

    def send(self) -> None:
        """The first byte leaves; raises LeaseLost instead when it may not."""
        self._before_send()
        self.flight.is_sent = True

    @property
    def sent(self) -> Sent:
        return Sent(self.target.method, self.target.url, tuple(self.headers.items()), 0)


Script = Callable[[Call], Awaitable[Outcome]]


class ScriptedDeliverer(Deliverer):
    """Does `script` for every delivery, and keeps the calls."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []

    async def deliver(
        self,
        target: Target,
        *,
        headers: Sequence[tuple[str, str]],
        deadline: timedelta,
        before_send: Callable[[], None],
        flight: Flight,
    ) -> tuple[Outcome, Sent]:
        call = Call(target, dict(headers), deadline, flight, before_send)
        flight.sent = call.sent
        self.calls.append(call)
        return await self.script(call), call.sent

    async def close(self) -> None: ...

    @property
    def sent(self) -> int:
        """How many requests have left."""
        return sum(1 for call in self.calls if call.flight.is_sent)


DONE = Delivered(Answer(200, (), "done", truncated=False), Timing(MS, 2 * MS, 3 * MS))
BUSY = Rejected(Answer(503, (), "busy", truncated=False), Timing(MS, 2 * MS, 3 * MS))


async def answered(call: Call) -> Outcome:
    """The target takes it at once."""
    call.send()
    return DONE


async def hangs_before_sending(call: Call) -> Outcome:
    """The connection never comes about."""
    await asyncio.Event().wait()
    return DONE


async def hangs_after_sending(call: Call) -> Outcome:
    """The target has the request and says nothing."""
    call.send()
    await asyncio.Event().wait()
    return DONE


@asynccontextmanager
async def open_desk(
    dsn: str, pool: Pool, script: Script = answered, *, settle_batch: int = 200
) -> AsyncIterator[tuple[Desk, ScriptedDeliverer]]:
    """A desk whose settler is at work."""
    deliverer = ScriptedDeliverer(script)
    keeper = LeaseKeeper(
        lambda: connect(dsn, application_name="carillon tests, keeper", command_timeout=timedelta(seconds=5)),
        ttl=TTL,
    )
    settler = Settler(pool, batch=settle_batch, wait=timedelta(), rng=random.Random(1))
    settling = asyncio.create_task(settler.run())
    desk = Desk(keeper, deliverer, settler, worker="one", timeout=TTL / 2, rng=random.Random(2))
    try:
        yield desk, deliverer
    finally:
        settler.finish()
        await asyncio.wait_for(settling, timeout=60)
        await keeper.close()
