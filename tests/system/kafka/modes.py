"""Replicas in kafka mode: their settings, and what their metrics say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from tests.brokers import BrokerPlace
from tests.eventually import eventually
from tests.system.replicas import Replica, probe

JOINED_WITHIN = timedelta(seconds=90)
PARTITIONS = 6
GRACE = timedelta(seconds=2)
SWEEP = timedelta(milliseconds=500)
"""The default of SCHEDULER_KAFKA_SWEEP_INTERVAL."""

_SAMPLE = re.compile(r"^scheduler_(\w+?)(?:_total)?(?:\{\w+=\"(\w+)\"\})? ([-+.e\d]+)$", re.MULTILINE)


def kafka_mode(place: BrokerPlace, *, grace: timedelta = GRACE) -> dict[str, str]:
    """Settings for `Fleet.start`."""
    return {
        "claim_mode": "kafka",
        "kafka_bootstrap": place.bootstrap,
        "kafka_topic": place.topic,
        "kafka_group": place.group,
        "kafka_partitions": str(PARTITIONS),
        "kafka_idempotence": str(place.server.has_idempotence).lower(),
        "kafka_grace": f"{int(grace.total_seconds() * 1000)}ms",
    }


async def figures(replicas: Iterable[Replica]) -> Counter[str]:
    """The sums of these replicas' counters, such as `hints sent`, `claims ring` and `claimed_runs`."""
    found: Counter[str] = Counter()
    async with probe() as client:
        for replica in replicas:
            text = (await client.get(f"{replica.url}/metrics")).text
            for name, label, value in _SAMPLE.findall(text):
                if not name.endswith("_created"):
                    found[f"{name} {label}".strip()] += int(float(value))
    return found


async def all_receive(*replicas: Replica) -> None:
    """Wait until each of these replicas owns partitions of the topic."""

    async def probe_all() -> bool:
        for replica in replicas:
            assert (await figures([replica]))["kafka_partitions"] > 0, f"{replica.name} owns no partition"
        return True

    await eventually(probe_all, within=JOINED_WITHIN)
