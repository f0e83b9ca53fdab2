"""Identities. A run's id is a pure function of (schedule, instant), so a replanned occurrence gets the same one.

The id is a UUIDv8 (RFC 9562, section 5.8): 48 bits of whole milliseconds since 1970, then the first bits of
SHA-256(schedule id ‖ microseconds as int64). Its head names the partition that holds the row, so a look-up by id
opens one partition instead of all. Everything is integer arithmetic: `timestamp() * 1000` gives the wrong
millisecond about once in 150, and hashing `isoformat()` gives two ids to one instant written in two zones.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NewType
from uuid import UUID

TenantId = NewType("TenantId", UUID)
ScheduleId = NewType("ScheduleId", UUID)
RunId = NewType("RunId", UUID)
DeliveryId = NewType("DeliveryId", UUID)
"""What the receiver sees and de-duplicates by: the id of the occurrence's run; a replay sends the original's."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MILLISECOND = timedelta(milliseconds=1)


def microseconds(instant: datetime) -> int:
    """Whole microseconds since 1970-01-01T00:00Z. Raises ValueError for naive or earlier instants."""
    if instant.tzinfo is None:
        raise ValueError(f"an instant needs a zone: {instant.isoformat()}")
    since = instant - EPOCH
    count = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    if count < 0:
        raise ValueError(f"an instant before 1970 has no run id: {instant.isoformat()}")
    return count


_VERSION_AND_VARIANT = 0x8 << 76 | 0x2 << 62
_FREE_BITS = (1 << 80) - 1 & ~(0xF << 76 | 0x3 << 62)


def run_id(schedule: ScheduleId, scheduled_for: datetime) -> RunId:
    """The id of the run of `schedule` at `scheduled_for` (years 1970 to 9999), in any zone's notation."""
    if scheduled_for.tzinfo is not UTC:
        microseconds(scheduled_for)  # refuses what has no zone
        scheduled_for = scheduled_for.astimezone(UTC)  # in zones, the two passes of a repeated hour are equal
    head, suffix = _of_instant(scheduled_for)
    digest = hashlib.sha256(schedule.bytes + suffix).digest()
    tail = int.from_bytes(digest[:10], "big") & _FREE_BITS
    return RunId(UUID(int=head | tail | _VERSION_AND_VARIANT))


@lru_cache(maxsize=1024)
def _of_instant(scheduled_for: datetime) -> tuple[int, bytes]:
    """What all runs of an instant (in UTC) share: the first 48 bits of their ids, and the hashed suffix."""
    micros = microseconds(scheduled_for)
    return micros // 1000 << 80, micros.to_bytes(8, "big")


def instants_of(run: UUID) -> tuple[datetime, datetime] | None:
    """The half-open millisecond [start, end) that `run`'s `scheduled_for` lies in; None when no run has such an id."""
    millis = run.int >> 80
    if run.version != 8 or millis > 253_402_300_799_998:
        return None
    start = EPOCH + timedelta(milliseconds=millis)
    return start, start + MILLISECOND


def is_occurrence_instant(instant: datetime) -> bool:
    """Occurrences are whole milliseconds; manual runs and replays are not, so the two never share a key."""
    return instant.microsecond % 1000 == 0


def manual_instant(now: datetime) -> datetime:
    """`now` with its sub-millisecond digits forced to 1..999: an instant that no occurrence can have."""
    return now if now.microsecond % 1000 else now + MICROSECOND
