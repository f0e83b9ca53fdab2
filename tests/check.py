"""All checks in one command: `python -m tests.check`. Every one runs, also after one that failed."""

# ruff: noqa: T201 - what it prints is what it is for

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent

CHECKS: dict[str, list[str | Path]] = {
    "lint": [sys.executable, "-m", "ruff", "check"],
    "format": [sys.executable, "-m", "ruff", "format", "--check"],
    "types": [sys.executable, "-m", "mypy"],
    "import rules": [PROGRAMS / "lint-imports"],
    "tests": [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "worksteal"],
}


def main() -> int:
    """Run the checks in their order; 0 when all pass, else 1."""
    failed: list[str] = []
    for name, command in CHECKS.items():
        print(f"== {name}", flush=True)
        begun = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        result = "passed" if code == 0 else f"FAILED ({code})"
        print(f"== {name}: {result}, {time.monotonic() - begun:.0f} s\n", flush=True)
        if code != 0:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
