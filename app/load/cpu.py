"""CPU time of processes and of the whole machine, from /proc (proc(5)). All times in seconds.

A process's own time is what its threads have used. A server that starts and ends processes of its own (PostgreSQL) is
counted with them: the living ones, and those that have ended and were waited for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.errors import CarillonError

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """One line of /proc/PID/stat. `own` is the process's, `ended` that of its children that were waited for."""

    pid: int
    parent: int
    own: float
    ended: float


def parse_stat(text: str) -> ProcessTimes:
    """Read /proc/PID/stat. The name in it may hold spaces and parentheses, so it is looked for from the right."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    user, system, children_user, children_system = (int(field) for field in fields[11:15])
    return ProcessTimes(
        pid=int(pid),
        parent=int(fields[1]),
        own=(user + system) / TICKS,
        ended=(children_user + children_system) / TICKS,
    )


def own_seconds(pid: int) -> float:
    """What the process itself has used. Raises CarillonError when it has ended: what it used is then unknown."""
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text()).own
    except (FileNotFoundError, ProcessLookupError):
        raise CarillonError(f"process {pid} has ended while its CPU time was measured") from None


def tree_seconds(pid: int) -> float:
    """What the process and its children, living and ended, have used. Raises CarillonError when it has ended.

    Looked at again until no child has ended in between, since that one's time moves from its own line to its parent's.
    """
    while True:
        before = _children_of(pid)
        living = 0.0
        try:
            for child in before:
                living += parse_stat((PROC / str(child) / "stat").read_text()).own
        except (FileNotFoundError, ProcessLookupError):
            continue
        try:
            times = parse_stat((PROC / str(pid) / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            raise CarillonError(f"process {pid} has ended while its CPU time was measured") from None
        if before <= _children_of(pid):
            return times.own + times.ended + living


def resident_bytes(pid: int) -> int:
    """The process's resident memory. Raises CarillonError when it has ended."""
    try:
        text = (PROC / str(pid) / "statm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise CarillonError(f"process {pid} has ended while its memory was measured") from None
    return int(text.split()[1]) * PAGE


def _children_of(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            found.update(int(child) for child in (thread / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        raise CarillonError(f"process {pid} has ended while its CPU time was measured") from None
    return found


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """The first line of /proc/stat: the CPU time of everybody, and what the host took for other guests."""

    busy: float
    stolen: float


def parse_machine(text: str) -> MachineTimes:
    """Read /proc/stat. Guest time is inside user time already; waiting for a disk is idle time."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) / TICKS for field in text.splitlines()[0].split()[1:9]
    )
    return MachineTimes(busy=user + nice + system + irq + softirq, stolen=steal)


@dataclass(frozen=True, slots=True)
class Processes:
    """Who is measured: process ids by the name of their part. `trees` are counted with their children."""

    single: Mapping[str, tuple[int, ...]]
    trees: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds used so far by each part, and by the whole machine."""

    parts: Mapping[str, float]
    machine: MachineTimes

    def since(self, earlier: CpuReading) -> CpuUse:
        """What was used between two readings of the same processes."""
        return CpuUse(
            parts={name: seconds - earlier.parts[name] for name, seconds in self.parts.items()},
            machine=self.machine.busy - earlier.machine.busy,
            stolen=self.machine.stolen - earlier.machine.stolen,
        )


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds that each part used, that the whole machine used, and that the host took away."""

    parts: Mapping[str, float]
    machine: float
    stolen: float

    @property
    def ours(self) -> float:
        return sum(self.parts.values())

    @property
    def others(self) -> float:
        """What everything else on the machine used: the noise in the figures, and this process itself."""
        return max(0.0, self.machine - self.ours)


def read(processes: Processes) -> CpuReading:
    """Read all of them, one after the other. Raises CarillonError when one has ended."""
    parts = {name: sum(own_seconds(pid) for pid in pids) for name, pids in processes.single.items()}
    parts |= {name: tree_seconds(pid) for name, pid in processes.trees.items()}
    return CpuReading(parts, parse_machine((PROC / "stat").read_text()))
