"""How late deliveries were: an HdrHistogram, and what a load run says of it.

The histogram is in microseconds with three significant digits: a value is exact to 0.1 %, whatever its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hdrh.histogram import HdrHistogram

LONGEST_US = 24 * 3600 * 1_000_000
DIGITS = 3
PERCENTILES: Mapping[str, float] = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}
TICKS_PER_HALF = 10
"""Points of the curve in each half of what is left up to 100 %: 0 to 50, 50 to 75, 75 to 87.5 …"""


class Lateness:
    """Lateness of many deliveries. `early` counts those before their instant; the two ends are exact.

    A delivery before its instant is a fault, and a histogram begins at zero: it is recorded as zero and counted.
    """

    def __init__(self, late_ns: Iterable[int]) -> None:
        """Record each, in nanoseconds."""
        by_us = Counter(nanoseconds // 1000 for nanoseconds in late_ns)
        self._histogram = HdrHistogram(1, LONGEST_US, DIGITS)
        self.count = by_us.total()
        self.earliest_us = min(by_us, default=0)
        self.latest_us = max(by_us, default=0)
        self.early = sum(count for us, count in by_us.items() if us < 0)
        for us, count in by_us.items():
            self._histogram.record_value(min(max(0, us), LONGEST_US), count)

    def percentiles(self) -> dict[str, float | None]:
        """p50, p90, p99, p999 and max in milliseconds; all None when there was no delivery."""
        if not self.count:
            return {**dict.fromkeys(PERCENTILES), "max": None}
        found = {name: self.at(percentile) for name, percentile in PERCENTILES.items()}
        return {**found, "max": self.latest_us / 1000}

    def at(self, percentile: float) -> float:
        """The lateness in milliseconds that so many percent of the deliveries did not exceed."""
        return self._exact(self._histogram.get_value_at_percentile(percentile))

    def curve(self) -> list[tuple[float, float]]:
        """(percentile, milliseconds), denser towards 100 % as HdrHistogram plots have it; empty without deliveries."""
        if not self.count:
            return []
        steps = self._histogram.get_percentile_iterator(TICKS_PER_HALF)
        return [(step.percentile_level_iterated_to, self._exact(step.value_iterated_to)) for step in steps]

    def _exact(self, us: int) -> float:
        """The histogram answers with the upper edge of a range, which may lie above the greatest value of all."""
        return min(us, self.latest_us) / 1000
