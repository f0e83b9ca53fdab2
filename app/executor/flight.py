"""How far one attempt has come, readable by whoever may have to cancel it, and the gate that its request
passes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter

from app.domain.outcome import Sent


@dataclass(slots=True)
class Flight:
    """Make one per attempt, pass it to `Deliverer.deliver`, and read it when the delivery was cancelled.

    `is_sent` turns true right before the first byte of the request is handed to the connection and never
    back: as long as it is false, nothing can have left. `phase` is `dns`, `connect`, `answer` or `body`, as
    in `TimedOut`. `sent` is the request as history keeps it, there from the start.
    """

    is_sent: bool = False
    phase: str = "connect"
    sent: Sent | None = None


@dataclass(slots=True)
class Departure:
    """One attempt on its way: what it has to ask before its request may leave, and when it got how far.

    Times are `perf_counter` seconds.
    """

    flight: Flight
    before_send: Callable[[], None]
    started_at: float
    ready_at: float | None = None
    answered_at: float | None = None

    def depart(self) -> None:
        """The last act before the first byte. Whatever `before_send` raises stops the request: nothing has
        left."""
        self.before_send()
        self.ready_at = perf_counter()
        self.flight.phase = "answer"
        self.flight.is_sent = True

    def answer(self) -> None:
        """The answer's head is complete."""
        self.answered_at = perf_counter()
        self.flight.phase = "body"


# The HTTP engine calls the resolver and the socket factory in the context of the task that called `deliver`; there is
# no argument of its own that would reach both. Set only while a new connection is made.
DEPARTURE: ContextVar[Departure] = ContextVar("carillon_departure")


def enter_phase(phase: str) -> None:
    """Note the phase of the attempt that runs in this context, if one does and its request has not left
    yet."""
    departure = DEPARTURE.get(None)
    if departure is not None and not departure.flight.is_sent:
        departure.flight.phase = phase
