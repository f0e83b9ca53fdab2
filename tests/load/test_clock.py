"""The offset between two clocks, by the quickest of several answers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from app.domain.ids import EPOCH
from app.load.clock import measure_offset


async def test_the_quickest_answer_tells_the_offset() -> None:
    ticks = iter([0, 1_000_000, 2_000_000, 2_000_200, 3_000_000, 3_500_000])
    answers = iter([EPOCH + timedelta(microseconds=micros) for micros in (100, 900, 3000)])

    async def ask() -> datetime:
        return next(answers)

    offset = await measure_offset(ask, looks=3, clock_ns=lambda: next(ticks))

    assert offset.ns == 2_000_100 - 900_000
    assert offset.error_ns == 100


async def test_a_clock_that_is_ahead_of_the_database_has_a_positive_offset() -> None:
    async def ask() -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    at = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000_000
    offset = await measure_offset(ask, looks=1, clock_ns=lambda: at + 5_000_000)

    assert offset.ns == 5_000_000
