"""Claim tokens and the local deadline of a lease."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from itertools import count

from app.store.claims import Grant

MARGIN_SHARE = 0.1
"""This part of a lease is kept back for the way of the answer and for a slow loop: nothing is sent in it."""


def boottime() -> float:
    """Seconds on CLOCK_BOOTTIME, which goes on while the host is suspended (CLOCK_MONOTONIC stands still)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def sendable_until(asked_at: float, ttl: timedelta) -> float:
    """The boot-time second after which a lease asked for at `asked_at` must not be used to send anything.

    Counted from before the statement was sent, so it always ends before the database's own expiry does.
    """
    return asked_at + ttl.total_seconds() * (1 - MARGIN_SHARE)


class Grants:
    """Makes the terms of each claim statement of this process.

    A token is `replica/64 random bits/number`. The bits are drawn here, after any fork, so two processes with the
    same replica name (or a cloned machine) never share one; the number makes every claim's token new.
    """

    def __init__(self, replica: str, ttl: timedelta) -> None:
        self._prefix = f"{replica.replace('/', '-')[:80]}/{secrets.token_hex(8)}"
        self._numbers = count(1)
        self._ttl = ttl

    def new(self) -> Grant:
        return Grant(
            token=f"{self._prefix}/{next(self._numbers)}",
            ttl=self._ttl,
            sent_before=sendable_until(boottime(), self._ttl),
        )
