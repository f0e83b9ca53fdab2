"""`carillon dev --claim-mode kafka`: its own broker, deliveries at once, hints soon after, and nothing left."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.eventually import eventually
from tests.servers import memory
from tests.system.devs import SAMPLES, Dev, delivered_samples, left_in
from tests.system.kafka.modes import JOINED_WITHIN
from tests.system.replicas import probe

DELIVERED_WITHIN = 15.0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Its temporary folder; any user may enter it, as PostgreSQL's account must."""
    folder = Path(tempfile.mkdtemp(prefix="carillon-tests-", dir=memory()))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


async def test_dev_in_kafka_mode_delivers_within_15_s_of_being_ready_and_leaves_nothing(
    temporary: Path, tmp_path: Path
) -> None:
    arguments = ["--claim-mode", "kafka", "--port", "0", "--replicas", "2"]
    dev = Dev(*arguments, temporary=temporary, log_path=tmp_path / "dev.log")
    try:
        await dev.ready()
        ready_at = time.monotonic()
        async with dev.client() as client:
            runs = await delivered_samples(client)
        assert time.monotonic() - ready_at < DELIVERED_WITHIN
        for name in SAMPLES:
            assert [attempt["outcome"] for attempt in runs[name]["attempts"]] == ["delivered"]
        async with probe() as prober:
            urls = dev.replica_urls()

            async def by_hint() -> bool:
                return sum([await _claimed_hints(prober, url) for url in urls]) > 0

            await eventually(by_hint, within=JOINED_WITHIN)
        assert len(dev.family()) >= 6, "itself, PostgreSQL, the broker, the receiver and two replicas"
        assert await dev.ended_by(signal.SIGINT) == 0
    finally:
        dev.kill()
    assert left_in(temporary) == []
    assert "Traceback" not in dev.output


async def _claimed_hints(client: httpx.AsyncClient, url: str) -> int:
    text = (await client.get(f"{url}/metrics")).text
    found = re.search(r'^scheduler_hints_total\{event="claimed"\} ([\d.]+)$', text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))
