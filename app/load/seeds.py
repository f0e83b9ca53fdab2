"""The schedules of load runs: what tenants would have written, made by the thousand; the same ones every time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from uuid import UUID

from app.domain import recurrence as recurrences
from app.domain import retry as retries
from app.domain import target as targets
from app.domain.ids import ScheduleId, TenantId, microseconds, run_id
from app.domain.recurrence import Cron
from app.domain.retry import DEFAULT
from app.domain.target import Target
from app.store.load_seed import SeededSchedule, tenant_id

EXPRESSIONS = 20
"""Distinct cron expressions among hourly schedules."""
EXPIRES_AFTER = timedelta(days=1)
BODY = '{"event":"due","source":"carillon load"}'
RETRY = retries.to_json(DEFAULT)


@lru_cache(maxsize=128)
def hourly(minute: int) -> tuple[str, ...]:
    """Hourly rules, as JSON, none of which fires again within 20 minutes of that minute.

    The pointer of a seeded schedule stands at its instant whatever its rule is; the next fire is the rule's own.
    """
    minutes = [(minute + 20 + offset) % 60 for offset in range(EXPRESSIONS)]
    return tuple(json.dumps(recurrences.to_json(Cron(f"{one} * * * *", "UTC"))) for one in minutes)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Hourly schedules dealt out to tenants in turn, each with a path of its own; the n-th is due at n × `apart`.

    `seed` tells one crowd's ids from another's.
    """

    schedules: int
    tenants: int = 1
    first_tenant: int = 1
    apart: timedelta = timedelta()
    seed: int = 1

    def at(self, first: datetime, url: str) -> Iterator[SeededSchedule]:
        """The crowd with its first instant, and where it delivers to. Instants are cut to whole milliseconds."""
        rng = random.Random(self.seed)
        for number in range(self.schedules):
            at = first + number * self.apart
            at = at.replace(microsecond=at.microsecond // 1000 * 1000)
            rules = hourly(at.minute)
            yield SeededSchedule(
                id=ScheduleId(UUID(int=rng.getrandbits(128), version=4)),
                tenant_id=tenant_id(self.first_tenant + number % self.tenants),
                recurrence=rules[number % len(rules)],
                target=target_text(url, number),
                retry=RETRY,
                next_fire_at=at,
            )


def target_text(url: str, number: int) -> str:
    """POST of a small JSON body to the path of schedule `number`, as the API stores it."""
    headers = (("Content-Type", "application/json"),)
    return targets.to_json(Target("POST", f"{url}/s/{number}", headers, BODY))


def tenant_ids(tenants: int, *, first_tenant: int = 1) -> list[TenantId]:
    """The tenants that crowds are dealt out to."""
    return [tenant_id(first_tenant + place) for place in range(tenants)]


def delivery_key(one: SeededSchedule) -> bytes:
    """The delivery id that the schedule's first occurrence must arrive under, as the target's ledger keeps it."""
    return run_id(one.id, one.next_fire_at).bytes


def instant_ns(instant: datetime) -> int:
    """Nanoseconds since 1970."""
    return microseconds(instant) * 1000
