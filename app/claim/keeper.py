"""Keeping leases true while their runs are worked on, and telling the work when one is lost.

One loop per replica extends all held leases in one statement on a connection of its own: an exhausted pool must
never cost a lease. Losing a lease interrupts the request in flight; what was already answered is still offered to the
guarded settlement, which alone decides.

    HELD --another claim or a terminal state was seen, or the local deadline passed--> LOST
    HELD --the row asks for cancellation--> CANCELLING
    HELD --drain past its grace--> ABANDONED
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum, auto
from types import TracebackType

from app import metrics
from app.boottime import boottime
from app.domain.run import ClaimedRun, Lease
from app.errors import LeaseLost, StoreUnavailable
from app.store import leases
from app.store.pool import Connection, close, translated

logger = logging.getLogger(__name__)

MARGIN_SHARE = 0.1
"""This part of a lease is kept back for the way of the answer and for a slow loop: nothing is sent in it."""


class Standing(Enum):
    """How it stands with a held lease."""

    HELD = auto()
    LOST = auto()
    CANCELLING = auto()
    ABANDONED = auto()


class Hold:
    """One lease while its run is worked on: a context, made by `LeaseKeeper.hold` only.

    There is one per run in flight and two of its contexts are entered for each, so they are plain classes with slots:
    generator contexts and a look-up by the lease's value cost four times as much.
    """

    __slots__ = ("_keepers", "_send_until", "_sending", "lease", "standing")

    def __init__(self, run: ClaimedRun, ttl: float, keepers: set[Hold]) -> None:
        self.lease = run.lease
        self.standing = Standing.HELD
        self._keepers = keepers
        self._send_until = sendable_until(run.asked_at, ttl)
        self._sending: asyncio.Task[object] | None = None

    def __enter__(self) -> Hold:
        self._keepers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._keepers.discard(self)

    def confirm(self) -> None:
        """Assert the lease right before the first byte leaves. Raises LeaseLost; then nothing may be sent."""
        if self.standing is not Standing.HELD or boottime() > self._send_until:
            raise LeaseLost

    def interruptible(self) -> _Interruptible:
        """While inside, an interrupt cancels the current task; the caller tells it from a real cancel by `standing`."""
        return _Interruptible(self)

    def interrupt(self, standing: Standing) -> None:
        """Stop sending, for a reason. Only the first reason counts; outside of sending it is only noted."""
        if self.standing is Standing.HELD:
            self.standing = standing
            if self._sending is not None:
                self._sending.cancel()

    def sending(self, task: asyncio.Task[object] | None) -> None:
        self._sending = task

    def extended(self, asked_at: float, ttl: float) -> None:
        self._send_until = sendable_until(asked_at, ttl)

    @property
    def is_sending(self) -> bool:
        return self._sending is not None

    @property
    def is_past_deadline(self) -> bool:
        return boottime() > self._send_until


class _Interruptible:
    __slots__ = ("_hold",)

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def __enter__(self) -> None:
        self._hold.sending(asyncio.current_task())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hold.sending(None)


def sendable_until(asked_at: float, ttl: float) -> float:
    """The boot-time second after which a lease asked for at `asked_at` must not be used to send anything.

    Counted from before the statement was sent, so it always ends before the database's own expiry does. `ttl` in
    seconds.
    """
    return asked_at + ttl * (1 - MARGIN_SHARE)


class LeaseKeeper:
    """Holds the leases of this replica. `connect` opens the keeper's own connection, again after each loss."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], *, ttl: timedelta) -> None:
        self._connect = connect
        self._ttl = ttl
        self._ttl_seconds = ttl.total_seconds()
        self._holds: set[Hold] = set()
        self._connection: Connection | None = None

    def hold(self, run: ClaimedRun) -> Hold:
        """Keep the run's lease for the length of the block."""
        return Hold(run, self._ttl_seconds, self._holds)

    @property
    def held(self) -> int:
        return len(self._holds)

    def abandon_all(self) -> None:
        """Interrupt every request that is still under way (drain past its grace)."""
        for hold in list(self._holds):
            hold.interrupt(Standing.ABANDONED)

    async def extend_all(self) -> timedelta | None:
        """One turn: extend everything held. A database that does not answer costs leases only by their own deadline."""
        if not self._holds:
            return None
        asked_at = boottime()
        asked = {hold.lease: hold for hold in self._holds}
        try:
            with translated():
                extended = await leases.extend(await self._open(), list(asked), ttl=self._ttl)
        except StoreUnavailable as error:
            logger.warning("keeper.unavailable", extra={"held": len(asked), "error": str(error)})
            await self.close()
            self._interrupt_overdue()
            return min(timedelta(seconds=1), self._ttl / 12)
        self._apply(extended, asked, asked_at)
        self._interrupt_overdue()
        return None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    async def _open(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connect()
        return self._connection

    def _apply(self, extended: leases.Extended, asked: Mapping[Lease, Hold], asked_at: float) -> None:
        metrics.KEEPER_EXTENDED.inc(len(extended.kept))
        metrics.KEEPER_BUSY.inc(len(extended.busy))
        for hold in self._still_held(extended.kept, asked):
            hold.extended(asked_at, self._ttl_seconds)
        for hold in self._still_held(extended.lost, asked):
            # A hold that is not sending is being settled, and its own settlement may be what ended the lease.
            if hold.is_sending:
                self._lose(hold)
        for hold in self._still_held(extended.cancel_requested, asked):
            hold.interrupt(Standing.CANCELLING)

    def _still_held(self, those: Iterable[Lease], asked: Mapping[Lease, Hold]) -> list[Hold]:
        """Their holds, without the ones that have ended while the database was asked."""
        return [hold for lease in those if (hold := asked[lease]) in self._holds]

    def _interrupt_overdue(self) -> None:
        for hold in list(self._holds):
            if hold.is_past_deadline and hold.is_sending:
                self._lose(hold)

    def _lose(self, hold: Hold) -> None:
        logger.warning("lease.lost", extra={"run_id": str(hold.lease.ref.id), "attempt": hold.lease.attempt})
        metrics.LEASE_LOST.inc()
        hold.interrupt(Standing.LOST)
