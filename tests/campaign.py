"""The long proofs, each with a command of its own:

    python -m tests.campaign kafka      more than half an hour: the conformance of both modes, every scenario of
                                        kafka mode on every broker there is, and long outages, storms and freezes
                                        with lateness judged; it prints its figures
    python -m tests.campaign load       three minutes: the scenarios of load runs that take long, each small

What follows the name goes to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CAMPAIGNS: dict[str, list[str]] = {
    "kafka": [
        "tests/system/test_conformance.py",
        "tests/system/kafka",
        "tests/system/kafka/campaign_trouble.py",
    ],
    "load": ["tests/load/campaign_scenarios.py"],
}


def main() -> int:
    """Run the campaign that is named; pytest's exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in CAMPAIGNS:
        sys.exit(f"which campaign? There are: {', '.join(CAMPAIGNS)}")
    command = [sys.executable, "-m", "pytest", "-s", "--timeout=900", *CAMPAIGNS[sys.argv[1]], *sys.argv[2:]]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TEST_ALL_BROKERS": "1"}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
