"""A database clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import datetime, timedelta

from app.store.pool import Connection, Pool

CREATE = """
CREATE SCHEMA test_clock;
CREATE TABLE test_clock.frozen (at timestamptz NOT NULL);
INSERT INTO test_clock.frozen VALUES (date_trunc('second', pg_catalog.now()));
CREATE FUNCTION test_clock.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
  AS 'SELECT at FROM test_clock.frozen';
"""

SESSION = {"search_path": "test_clock, pg_catalog, public"}
"""Session settings under which an unqualified now() is the frozen one."""


class FrozenClock:
    """`now()` of every statement on `pool` is what was set last; it starts at the real time, on a full second.

    Column defaults keep the real clock: they were bound to it when the table was created. Unlike the real `now()`
    the frozen one may change inside a transaction.
    """

    def __init__(self, *, pool: Pool, mover: Connection) -> None:
        self.pool = pool
        self._mover = mover

    async def now(self) -> datetime:
        """Where the clock stands."""
        at: datetime = await self._mover.fetchval("SELECT test_clock.now()")
        return at

    async def set(self, at: datetime) -> datetime:
        """Move the clock, forwards or backwards; returns `at`. Mind that runs need a partition for their month."""
        await self._mover.execute("UPDATE test_clock.frozen SET at = $1", at)
        return at

    async def tick(self, delta: timedelta) -> datetime:
        """Move the clock by `delta`; returns the new time."""
        return await self.set(await self.now() + delta)
