"""What a stretch of work costs: CPU time by part, write-ahead log, statements, transactions."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app.load import cpu
from app.load.cpu import CpuReading, CpuUse, Processes
from app.store import load_measure
from app.store.pool import Connection

PARTS = ("executor", "planner", "postgres", "receiver", "broker")
MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Between two readings. `statements` is None where the server does not count them; CPU times in seconds."""

    seconds: float
    cpu: CpuUse
    wal_bytes: int
    statements: int | None
    transactions: int

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
    statements: int | None
    transactions: int

    @classmethod
    async def read(cls, conn: Connection, processes: Processes) -> Meter:
        """Read everything now. Raises CarillonError when one of the processes has ended."""
        statements = await load_measure.statement_calls(conn)
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
            statements=None
            if now.statements is None or self.statements is None
            else now.statements - self.statements,
            transactions=now.transactions - self.transactions,
        )
