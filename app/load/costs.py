"""What a stretch of work costs: CPU time by part, write-ahead log, statements, transactions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.load import cpu
from app.load.cpu import CpuReading, CpuUse, Processes
from app.store import load_measure
from app.store.load_measure import StatementUse
from app.store.pool import Connection

PARTS = ("executor", "planner", "postgres", "receiver", "broker")
MICRO = 1_000_000
BUSIEST = 12
SHOWN = 160
"""Characters of a statement's text that are told."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Between two readings. `statements` is None where the server does not count them; CPU times in seconds."""

    seconds: float
    cpu: CpuUse
    wal_bytes: int
    statements: Sequence[StatementUse] | None
    transactions: int

    def statements_per_run(self, runs: int) -> float | None:
        """Executed statements per run."""
        if self.statements is None or not runs:
            return None
        return sum(one.calls for one in self.statements) / runs

    def busiest_statements(self, runs: int) -> list[dict[str, str | float]] | None:
        """The statements that took most of the server's time, with calls and microseconds per run."""
        if self.statements is None or not runs:
            return None
        ordered = sorted(self.statements, key=lambda one: one.total_ms, reverse=True)
        return [
            {
                "query": " ".join(one.query.split())[:SHOWN],
                "calls_per_run": one.calls / runs,
                "us_per_run": one.total_ms * 1000 / runs,
                "ms_per_call": one.total_ms / one.calls,
            }
            for one in ordered[:BUSIEST]
        ]

    def cpu_us_per_run(self, runs: int) -> dict[str, float | None]:
        """Microseconds per run: `total` over all measured parts, then each part; None for a part that was not there.

        Without the database's own time (a server that is not ours) there is no total.
        """
        if not runs:
            return dict.fromkeys(("total", *PARTS))
        found = {part: self.cpu.parts.get(part) for part in PARTS}
        each = {part: None if seconds is None else seconds * MICRO / runs for part, seconds in found.items()}
        return {"total": self.cpu.ours * MICRO / runs if "postgres" in self.cpu.parts else None, **each}

    @property
    def stolen_share(self) -> float:
        """How much of one core the host took away for other guests meanwhile."""
        return self.cpu.stolen / self.seconds if self.seconds else 0.0

    @property
    def others_share(self) -> float:
        """How much of one core others on this machine used meanwhile: noise in every figure, ourselves included."""
        return self.cpu.others / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Meter:
    """A reading at the begin of a stretch; `read` makes it, `costs` compares it with now."""

    processes: Processes
    at: float
    cpu: CpuReading
    wal_bytes: int
    statements: Mapping[int, StatementUse] | None
    transactions: int

    @classmethod
    async def read(cls, conn: Connection, processes: Processes) -> Meter:
        """Read everything now. Raises CarillonError when one of the processes has ended."""
        statements = await load_measure.statement_use(conn)
        transactions = await load_measure.transactions(conn)
        wal = await load_measure.wal_bytes(conn)
        return cls(processes, time.monotonic(), cpu.read(processes), wal, statements, transactions)

    async def costs(self, conn: Connection) -> Costs:
        """What has been used since. Raises like `read`."""
        now = await Meter.read(conn, self.processes)
        return Costs(
            seconds=now.at - self.at,
            cpu=now.cpu.since(self.cpu),
            wal_bytes=now.wal_bytes - self.wal_bytes,
            statements=_between(self.statements, now.statements),
            transactions=now.transactions - self.transactions,
        )


def _between(
    before: Mapping[int, StatementUse] | None, after: Mapping[int, StatementUse] | None
) -> list[StatementUse] | None:
    """What was executed between two readings; None where one of them could not be had."""
    if before is None or after is None:
        return None
    used: list[StatementUse] = []
    for key, now in after.items():
        then = before.get(key, StatementUse(now.query, 0, 0.0))
        if now.calls > then.calls:
            used.append(StatementUse(now.query, now.calls - then.calls, now.total_ms - then.total_ms))
    return used
