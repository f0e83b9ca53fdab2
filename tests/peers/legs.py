"""One leg: PGQueuer empties a queue, and what was seen of it in the database and at the target."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from app.errors import CarillonError
from app.load import cpu
from app.load.ledger import fetch_counts, fetch_ledger
from app.local.postgres import EmbeddedPostgres
from app.local.processes import die_with_parent

WORKER = Path(__file__).with_name("pgqueuer_worker.py")
MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """How PGQueuer is run; see `README.md` for why these.

    `max_concurrent` None is unlimited; `managers` are queue managers in each process; `pool` is the number of
    connections of each of them, 0 a single direct one; `limit` is aiohttp's of open connections.
    """

    batch_size: int
    max_concurrent: int | None
    managers: int
    pool: int
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Leg:
    """What one leg has shown. `per_s` counts durable completions; CPU times are in microseconds per job."""

    per_s: float
    duplicates: int
    missing: int
    cpu_us_per_job: dict[str, float]
    seconds: float


def run_leg(
    python: Path,
    server: EmbeddedPostgres,
    *,
    name: str,
    jobs: int,
    processes: int,
    options: Options,
    deliver: bool,
) -> Leg:
    """Drain `jobs` jobs with so many processes, in a database of its own. Main thread only.

    Raises CarillonError when a worker fails.
    """
    seed = random.SystemRandom().getrandbits(32)
    dsn = server.create_database(name)
    with contextlib.ExitStack() as running:
        running.callback(server.drop_database, name)
        _ask(python, "prepare", dsn, jobs, seed)
        target = (
            running.enter_context(_started([sys.executable, "-m", "app.load.target"])) if deliver else None
        )
        port = target.say()["port"] if target else 0
        given = {**asdict(options), "url": f"http://127.0.0.1:{port}/peer" if deliver else ""}
        argv = [os.fspath(python), os.fspath(WORKER), "drain", dsn, json.dumps(given)]
        workers = [running.enter_context(_started(argv)) for _ in range(processes)]
        for worker in workers:
            worker.say()
        parts = {"worker": tuple(worker.process.pid for worker in workers)}
        if target is not None:
            parts["receiver"] = (target.process.pid,)
        measured = cpu.Processes(parts, {"postgres": server.pid})
        before = cpu.read(measured)
        for worker in workers:
            worker.tell("go")
        said = [worker.say() for worker in workers]
        used = cpu.read(measured).since(before)
        for worker in workers:
            worker.tell("thanks")
        durable = _ask(python, "result", dsn)
        begun = min(each["begun"] for each in said)
        seconds = (durable["last"] or max(each["done"] for each in said)) - begun
        seen = _seen_at_target(port, seed, jobs) if deliver else (0, 0)
    return Leg(
        per_s=durable["distinct"] / seconds,
        duplicates=durable["logged"] - durable["distinct"] + seen[0],
        missing=max(jobs - durable["distinct"], seen[1]),
        cpu_us_per_job={
            "total": used.ours * MICRO / jobs,
            **{part: spent * MICRO / jobs for part, spent in used.parts.items()},
        },
        seconds=seconds,
    )


def median_leg(legs: Sequence[Leg]) -> Leg:
    """The medians of several; what was lost or doubled is the worst that was seen."""
    return Leg(
        per_s=statistics.median(leg.per_s for leg in legs),
        duplicates=max(leg.duplicates for leg in legs),
        missing=max(leg.missing for leg in legs),
        cpu_us_per_job={
            part: statistics.median(leg.cpu_us_per_job[part] for leg in legs)
            for part in legs[0].cpu_us_per_job
        },
        seconds=statistics.median(leg.seconds for leg in legs),
    )


def rounded(leg: Leg) -> Leg:
    """To a tenth: more would only look exact."""
    cpu_us = {part: round(spent, 1) for part, spent in leg.cpu_us_per_job.items()}
    return replace(leg, per_s=round(leg.per_s, 1), cpu_us_per_job=cpu_us, seconds=round(leg.seconds, 3))


def expected_keys(seed: int, jobs: int) -> set[bytes]:
    """The keys of the jobs that `prepare` has made of this seed."""
    rng = random.Random(seed)
    return {UUID(int=rng.getrandbits(128)).bytes for _ in range(jobs)}


def _seen_at_target(port: int, seed: int, jobs: int) -> tuple[int, int]:
    """Duplicates and missing deliveries, by delivery id."""
    ledger = fetch_ledger(port)
    if fetch_counts(port)["malformed"] or ledger.unidentified:
        raise CarillonError("the target got requests that were not the peer's")
    return ledger.duplicates, len(expected_keys(seed, jobs) - ledger.first.keys())


@dataclass(frozen=True, slots=True)
class _Program:
    """A child that speaks one JSON object per line and is told to go on by a line."""

    process: subprocess.Popen[str]

    def say(self) -> dict[str, Any]:
        """What it says next. Raises CarillonError when it has ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CarillonError(f"a program of the peer leg ended with code {self.process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def _started(argv: Sequence[str]) -> Iterator[_Program]:
    """A child that ends with us; in the end it is terminated, and killed if that does not help."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - two system calls, no lock taken
    )
    with process:  # waits for its end and closes the pipes
        try:
            yield _Program(process)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _ask(python: Path, *arguments: object) -> dict[str, Any]:
    with _started(
        [os.fspath(python), os.fspath(WORKER), *(str(argument) for argument in arguments)]
    ) as program:
        return program.say()
