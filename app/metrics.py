"""Every metric of Carillon, declared once. No label ever carries a tenant, a schedule, a run or an address.

Gauges that are measured in the database start as NaN: "not measured yet" must not read as zero, neither to
an alert nor to an autoscaler. Series with a known set of label values exist from the start, because `rate()`
does not see the first step of a series that appears with it.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

REGISTRY = CollectorRegistry(auto_describe=True)
PlatformCollector(registry=REGISTRY)
ProcessCollector(registry=REGISTRY)

_NOT_MEASURED = float("nan")
_PREFIX = "scheduler"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_DELIVERY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0)
_LATENESS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(name, meaning, labels, namespace=_PREFIX, registry=REGISTRY)


def _gauge(name: str, meaning: str, *labels: str) -> Gauge:
    return Gauge(name, meaning, labels, namespace=_PREFIX, registry=REGISTRY)


def _unmeasured_gauge(name: str, meaning: str) -> Gauge:
    gauge = _gauge(name, meaning)
    gauge.set(_NOT_MEASURED)
    return gauge


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(name, meaning, labels, namespace=_PREFIX, buckets=buckets, registry=REGISTRY)


# The fleet's work, measured in the database by the replica itself.
RUNS_DUE_BACKLOG = _unmeasured_gauge(
    "runs_due_backlog", "Open runs that are due and not leased. Counted up to a bound. Autoscale on it."
)
OLDEST_DUE_SECONDS = _unmeasured_gauge(
    "oldest_due_seconds",
    "How long the oldest due run has been waiting for a claim; 0 without one.",
)
CLOCK_SKEW_SECONDS = _unmeasured_gauge(
    "clock_skew_seconds", "This replica's clock minus the database's. Alert when it is beyond 2 either way."
)
PARTITION_HORIZON_SECONDS = _unmeasured_gauge(
    "partition_horizon_seconds", "From the database's now to the end of the last attached month."
)

# Planner.
PLANNED_RUNS = _counter("planned_runs", "Runs that the planner wrote.")
PLANNER_BATCH_SECONDS = _histogram("planner_batch_seconds", "One planner batch, lock to commit.", _SHORT)
PLANNER_BATCH_REFUSED = _counter(
    "planner_batch_refused", "Planner batches that the database refused and that were repeated in halves."
)
REPLANS = _counter("replans", "Occurrences that had their run already (benign: the unique guard).")
MISFIRES = _counter("misfires", "Occurrences that got a disposition and no run, by reason.", "reason")
QUARANTINED = _counter("quarantined", "Schedules set aside because they could not be planned.")

# Claims and leases.
CLAIMS = _counter("claims", "Claim statements, by what asked for them.", "source")
CLAIMED_RUNS = _counter("claimed_runs", "Runs leased by this replica.")
LEASE_LOST = _counter("lease_lost", "Leases that were lost while this replica worked on the run.")
KEEPER_BUSY = _counter("keeper_busy", "Leases that an extend found locked, and left for later.")
KEEPER_EXTENDED = _counter("keeper_extended", "Leases extended.")
REAPED = _counter("reaped", "Expired leases recovered by the reaper.")

# Hints (kafka mode).
HINTS = _counter("hints", "Hints, by what became of them.", "event")
for _event in ("sent", "lost", "dropped", "received", "malformed", "stale", "claimed", "refused"):
    HINTS.labels(_event)
HINTS_WAITING = _gauge(
    "hints_waiting", "Hints held by this replica until they are due or their tenant has room."
)
KAFKA_PARTITIONS = _gauge("kafka_partitions", "Partitions that this replica receives hints from.")
KAFKA_ERRORS = _counter("kafka_errors", "Calls to the broker that failed, by what they were for.", "call")
for _call in ("receive", "commit"):
    KAFKA_ERRORS.labels(_call)

# Executor.
SLOTS = _gauge("slots", "Deliveries that this replica can run at once.")
IN_FLIGHT = _gauge("in_flight", "Runs that this replica holds a lease on right now.")
FIRE_LATENESS_SECONDS = _histogram(
    "fire_lateness_seconds", "First byte of the first attempt minus scheduled_for.", _LATENESS
)
DELIVERY_SECONDS = _histogram("delivery_seconds", "One whole attempt, name look-up to last byte.", _DELIVERY)
ATTEMPTS = _counter("attempts", "Attempts that ended, by outcome.", "outcome")

# Settling.
SETTLED = _counter("settled", "Settlements written, by what they said.", "settlement")
for _settlement in ("complete", "retry", "fail", "cancel", "defer", "release"):
    SETTLED.labels(_settlement)
SETTLE_BATCH_SIZE = _histogram("settle_batch_size", "Settlements in one transaction.", _SIZES)
SETTLE_REFUSED = _counter(
    "settle_refused", "Runs marked failed because the database refused their settlement."
)

# The process itself.
LOOP_LAST_SUCCESS_SECONDS = _gauge(
    "loop_last_success_seconds",
    "Unix time of the loop's last good turn (of its start before the first).",
    "loop",
)
LOOP_ERRORS = _counter("loop_errors", "Turns of the loop that failed.", "loop")
DB_POOL_SIZE = _gauge("db_pool_size", "Open connections of the pool.", "pool")
DB_POOL_IDLE = _gauge("db_pool_idle", "Open connections of the pool that nobody uses.", "pool")
API_REQUESTS = _counter("api_requests", "Answered API requests.", "method", "status")
API_REQUEST_SECONDS = _histogram("api_request_seconds", "One API request.", _SHORT)
TZDATA_INFO = _gauge("tzdata_info", "The IANA time zone release in use; always 1.", "version")
BUILD_INFO = _gauge("build_info", "The version of Carillon; always 1.", "version")


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


_ATTEMPTS_BY_OUTCOME = {
    outcome: ATTEMPTS.labels(outcome)
    for outcome in ("delivered", "rejected", "timed_out", "unreachable", "blocked", "abandoned")
}


def note_attempt(outcome: str) -> None:
    """One attempt that ended. Looking the series up by its label costs six times the counting, for every run."""
    _ATTEMPTS_BY_OUTCOME[outcome].inc()


def note_request(method: str, status: int, seconds: float) -> None:
    """One answered API request. A caller may send any word as a method; it does not make a new series."""
    API_REQUESTS.labels(method if method in _METHODS else "other", str(status)).inc()
    API_REQUEST_SECONDS.observe(seconds)


def watch_pool(name: str, *, size: Callable[[], int], idle: Callable[[], int]) -> None:
    """Read a pool's figures at every scrape: watch_pool("main", size=pool.get_size, idle=pool.get_idle_size)."""
    DB_POOL_SIZE.labels(name).set_function(size)
    DB_POOL_IDLE.labels(name).set_function(idle)


def render() -> tuple[bytes, str]:
    """The text exposition of everything above, and its media type."""
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST
