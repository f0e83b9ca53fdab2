"""The terms of each claim: its token."""

from __future__ import annotations

import secrets
from datetime import timedelta
from itertools import count

from app.boottime import boottime
from app.store.claims import Grant


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
        return Grant(token=f"{self._prefix}/{next(self._numbers)}", ttl=self._ttl, asked_at=boottime())
