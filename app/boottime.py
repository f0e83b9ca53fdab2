"""The one clock for local deadlines: it goes on while the host is suspended, and nobody can set it."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds on CLOCK_BOOTTIME. CLOCK_MONOTONIC stands still in suspend, and a lease must not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
