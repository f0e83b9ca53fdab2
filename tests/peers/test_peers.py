"""What the peer leg says of what it has seen. The leg itself is a command, since it installs another queue."""

from __future__ import annotations

import random
import re
from pathlib import Path
from uuid import UUID

from tests.peers.__main__ import LEGS, summary
from tests.peers.environment import LOCK
from tests.peers.legs import Leg, expected_keys, median_leg, rounded

ROOT = Path(__file__).parents[2]


def leg(per_s: float, *, duplicates: int = 0, missing: int = 0, worker: float = 100.0) -> Leg:
    return Leg(per_s, duplicates, missing, {"total": worker + 50, "worker": worker, "postgres": 50.0}, 1.0)


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(), flags=re.MULTILINE))


def test_the_peer_has_our_versions_of_what_both_use() -> None:
    ours, theirs = pins(ROOT / "requirements.lock"), pins(LOCK)
    assert "pgqueuer" in theirs
    assert "pgqueuer" not in ours
    shared = ("aiohttp", "asyncpg", "uvloop")
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


def test_of_several_runs_the_medians_count_and_the_worst_losses() -> None:
    merged = median_leg([leg(10, worker=3), leg(30, duplicates=1, worker=1), leg(20, missing=2, worker=2)])
    assert (merged.per_s, merged.duplicates, merged.missing, merged.cpu_us_per_job["worker"]) == (20, 1, 2, 2)


def test_the_summary_has_every_rate_and_adds_up_what_was_lost() -> None:
    found = summary({"noop": leg(14_000), "http_1": leg(4_000, duplicates=1, missing=2)}, jobs=10)
    assert set(LEGS) == {"noop", "http_1", "http_2"}
    assert (found["noop_per_s"], found["http_1_per_s"], found["http_2_per_s"]) == (14_000, 4_000, None)
    assert (found["duplicates"], found["missing"]) == (1, 2)
    assert found["cpu_us_per_job"]["noop"]["worker"] == 100
    assert rounded(leg(1.26)).per_s == 1.3


def test_the_parent_knows_the_ids_that_the_worker_makes_of_a_seed() -> None:
    rng = random.Random(7)
    assert expected_keys(7, 3) == {UUID(int=rng.getrandbits(128)).bytes for _ in range(3)}
