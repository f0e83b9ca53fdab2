"""What is on the topic: one small message per run, keyed by tenant.

    key    the tenant's id, 16 bytes (spread over k virtual shards: one more byte)
    value  {"v": 1, "run": "<run id>", "at": <scheduled_for>, "due": <fire_after>}     microseconds since 1970

Nothing else: the row is the truth, and a hint only says where to look. A message that cannot be read is nobody's
order; it is counted and passed over.
"""

from __future__ import annotations

import json
from datetime import timedelta
from functools import lru_cache
from typing import TypeGuard
from uuid import UUID

from app.domain.ids import EPOCH, RunId, TenantId, microseconds
from app.domain.run import RunRef

VERSION = 1
LONGEST = 512
"""Bytes of a value; what is longer is not even parsed."""
_LATEST = 253_402_300_799_998_999
"""The last microsecond that a run can have: its millisecond ends in the year 9999."""


def encode(ref: RunRef, *, shards: int) -> tuple[bytes, bytes]:
    """Key and value. `shards` > 1 spreads one tenant's hints over so many keys, by the run's id."""
    key = ref.tenant_id.bytes
    if shards > 1:
        key += bytes([ref.id.int % shards])
    # By hand: a hint is made for every run, and this is a third of what `json.dumps` costs.
    at, due = microseconds(ref.scheduled_for), microseconds(ref.fire_after)
    return key, b'{"v":%d,"run":"%b","at":%d,"due":%d}' % (VERSION, str(ref.id).encode(), at, due)


def decode(key: bytes | None, value: bytes | None) -> RunRef:
    """Read a hint. Raises ValueError for anything that does not say exactly what `encode` says."""
    if key is None or value is None or len(key) not in (16, 17) or len(value) > LONGEST:
        raise ValueError("a hint has a tenant as its key and a small value")
    data = json.loads(value.decode())
    if not isinstance(data, dict) or not _is_whole(data.get("v")) or data["v"] != VERSION:
        raise ValueError("a hint of another version")
    run, at, due = data.get("run"), data.get("at"), data.get("due")
    if not isinstance(run, str) or not _is_instant(at) or not _is_instant(due):
        raise ValueError("a hint names its run and two instants")
    run_id = RunId(UUID(run))
    if run_id.version != 8 or run_id.int >> 80 != at // 1000:  # as `instants_of`, without making instants
        raise ValueError("a hint whose run cannot have this instant")
    scheduled_for = EPOCH + timedelta(microseconds=at)
    fire_after = scheduled_for if due == at else EPOCH + timedelta(microseconds=due)
    return RunRef(run_id, _tenant(key[:16]), scheduled_for, fire_after)


@lru_cache(maxsize=10_000)
def _tenant(key: bytes) -> TenantId:
    """The same object for the same tenant: whoever looks it up in a dict then need not compare."""
    return TenantId(UUID(bytes=key))


def _is_instant(value: object) -> TypeGuard[int]:
    return _is_whole(value) and 0 <= value <= _LATEST


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int  # True is no number here
