"""What another queue on PostgreSQL reaches on this machine, for comparison with `carillon load`:

    python -m tests.peers --jobs 100000 --out DIR

PGQueuer drains the same number of jobs from the same PostgreSQL with the same durable settings: jobs that do nothing,
then jobs that send one request with aiohttp to the same target, with one process and with two. Writes DIR/peers.json.
How PGQueuer is set up, and why so: tests/peers/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.errors import CarillonError
from app.load.environment import cpu_model, package_versions, python_loop_ms
from app.load.place import SERVER_SETTINGS
from app.local.postgres import EmbeddedPostgres
from tests.peers.environment import peer_python
from tests.peers.legs import Leg, Options, median_leg, rounded, run_leg

NOOP = Options(batch_size=1000, max_concurrent=None, managers=1, pool=4)
HTTP = Options(batch_size=250, max_concurrent=500, managers=1, pool=4, limit=100)

LEGS: dict[str, tuple[int, Options, bool]] = {
    "noop": (1, NOOP, False),
    "http_1": (1, HTTP, True),
    "http_2": (2, HTTP, True),
}
"""Name of the leg: processes, options, whether requests are sent."""


def main() -> int:
    """Run the legs; 1 when a job was lost or done twice."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers", description="PGQueuer on the same machine."
    )
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--repeat", type=int, default=1, help="medians of so many runs of each leg")
    parser.add_argument("--legs", default=",".join(LEGS), help="which of them, separated by commas")
    parser.add_argument("--work-dir", type=Path, help="where the database is while it runs; never in memory")
    wanted = parser.parse_args()
    chosen = wanted.legs.split(",")
    if wanted.jobs < 1 or wanted.repeat < 1 or not set(chosen) <= set(LEGS):
        parser.error(f"--jobs and --repeat are at least 1, --legs are among {','.join(LEGS)}")
    say("preparing PGQueuer's environment")
    python = peer_python()
    load_before = os.getloadavg()
    runs: dict[str, list[Leg]] = {name: [] for name in chosen}
    with EmbeddedPostgres.start(settings=SERVER_SETTINGS, temporary_in=wanted.work_dir) as server:
        for turn in range(wanted.repeat):
            for name in chosen:
                processes, options, deliver = LEGS[name]
                begun = time.monotonic()
                leg = run_leg(
                    python,
                    server,
                    name=f"peer_{name}_{turn}",
                    jobs=wanted.jobs,
                    processes=processes,
                    options=options,
                    deliver=deliver,
                )
                runs[name].append(leg)
                took = time.monotonic() - begun
                say(f"{name}: {leg.per_s:,.0f} jobs/s ({took:.0f} s with seeding)")
        found = {name: rounded(median_leg(legs)) for name, legs in runs.items()}
        content = {
            **summary(found, jobs=wanted.jobs),
            "repeats": {name: [rounded(leg).per_s for leg in legs] for name, legs in runs.items()},
            "options": {name: {"processes": LEGS[name][0], **asdict(LEGS[name][1])} for name in chosen},
            "versions": {"postgresql": server.version, **peer_versions(python)},
            "env": {
                "server_settings": dict(SERVER_SETTINGS),
                "cpu_model": cpu_model(),
                "cores": os.cpu_count(),
                "load_average_before": list(load_before),
                "python_loop_ms": round(python_loop_ms(), 2),
                "carillon": package_versions(),
            },
        }
    wanted.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2)
    (wanted.out / "peers.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 1 if content["duplicates"] or content["missing"] else 0


def say(text: str) -> None:
    """Progress, apart from what is printed."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def summary(found: dict[str, Leg], *, jobs: int) -> dict[str, Any]:
    """The keys that scripts rely on; null for a leg that was not run."""
    rates: dict[str, float | None] = {f"{name}_per_s": None for name in LEGS}
    rates |= {f"{name}_per_s": leg.per_s for name, leg in found.items()}
    return {
        "peer": "pgqueuer",
        "jobs": jobs,
        **rates,
        "duplicates": sum(leg.duplicates for leg in found.values()),
        "missing": sum(leg.missing for leg in found.values()),
        "cpu_us_per_job": {name: leg.cpu_us_per_job for name, leg in found.items()},
    }


def peer_versions(python: Path) -> dict[str, str]:
    """What the peer's environment has of what does the work."""
    names = ("pgqueuer", "aiohttp", "asyncpg", "uvloop")
    ask = f"from importlib.metadata import version\nfor name in {names!r}: print(version(name))"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return {**dict(zip(names, told, strict=True)), "python": sys.version.split()[0]}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CarillonError as problem:
        sys.exit(str(problem))
