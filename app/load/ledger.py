"""What the target of a load run has seen, for the verdict: exactly once or not, and how late.

How a scenario uses it, all times in nanoseconds since 1970, `due` by the database's clock and `offset_ns` the target's
clock minus the database's:

    ledger = fetch_ledger(port)
    ledger.requests, ledger.distinct, ledger.duplicates
    missing = expected_keys - ledger.first.keys()             # keys: UUID(...).bytes of the delivery ids
    lateness = lateness_of(ledger.first, due, offset_ns=offset_ns)     # due: one instant, or one for each key
    lateness.percentiles()                                    # {"p50": 1.25, "p90": ..., "max": ...} in milliseconds
    lateness.curve()                                          # the points of the report's curve
    ledger.series(begin_ns=due)                               # arrivals in each 100 ms since the instant
"""

from __future__ import annotations

import http.client
import json
import struct
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from app.errors import CarillonError
from app.load.arrivals import KEY_BYTES, NO_KEY, Arrivals
from app.load.lateness import Lateness

HOST = "127.0.0.1"
STEP_NS = 100_000_000
FETCH_LIMIT = 60.0
"""Seconds; ten million requests are 240 MB."""


@dataclass(frozen=True)
class Ledger:
    """All requests of a run. Costs about 0.2 KB for each delivery once `first` has been asked for."""

    arrivals: Arrivals

    @property
    def requests(self) -> int:
        """How many requests came, all of them."""
        return len(self.arrivals)

    @cached_property
    def first(self) -> dict[bytes, int]:
        """For each delivery id's key (see `app.load.arrivals.key_of`) when its first request came.

        Requests without a delivery id are left out; they are `unidentified`.
        """
        keys = [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", self.arrivals.keys)]
        times = self.arrivals.times
        found = dict(
            zip(reversed(keys), reversed(times), strict=True)
        )  # the earlier one is put in last, and stays
        if len(found) < len(
            keys
        ):  # complete in another order than begun: only where a key came twice it matters
            for key, arrived_ns in zip(keys, times, strict=True):
                if arrived_ns < found[key]:
                    found[key] = arrived_ns
        found.pop(NO_KEY, None)
        return found

    @property
    def distinct(self) -> int:
        """How many delivery ids came."""
        return len(self.first)

    @cached_property
    def unidentified(self) -> int:
        """How many requests came without a delivery id."""
        return sum(key == NO_KEY for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", self.arrivals.keys))

    @property
    def duplicates(self) -> int:
        """How many requests came beyond the first of each delivery id."""
        return self.requests - self.unidentified - self.distinct

    def repeated(self, limit: int = 20) -> dict[bytes, int]:
        """The keys that came more than once with how often, the most frequent first: for the message of a failure."""
        counted = Counter(key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", self.arrivals.keys))
        del counted[NO_KEY]
        return {key: count for key, count in counted.most_common(limit) if count > 1}

    def series(self, *, begin_ns: int, step_ns: int = STEP_NS) -> list[int]:
        """Requests in each step since `begin_ns`; those that came before it are counted in the first step."""
        counted = Counter(max(0, (arrived_ns - begin_ns) // step_ns) for arrived_ns in self.arrivals.times)
        return [counted[step] for step in range(max(counted, default=-1) + 1)]

    def span_ns(self) -> tuple[int, int]:
        """The first and the last arrival. Raises `CarillonError` when nothing came."""
        if not self.requests:
            raise CarillonError("the target has received nothing")
        return min(self.arrivals.times), max(self.arrivals.times)


def lateness_of(
    first: Mapping[bytes, int], due: int | Mapping[bytes, int], *, offset_ns: int = 0
) -> Lateness:
    """How late each delivery's first byte came.

    `due` is one instant for all, or one for each key; deliveries it does not know are left out. Times in nanoseconds
    since 1970; `offset_ns` is the target's clock minus the one by which `due` was written.
    """
    late = array("q")
    if isinstance(due, int):
        late.extend(arrived_ns - due - offset_ns for arrived_ns in first.values())
    else:
        late.extend(arrived_ns - due[key] - offset_ns for key, arrived_ns in first.items() if key in due)
    return Lateness(late)


def fetch_ledger(port: int) -> Ledger:
    """What the target on this port has seen so far. Blocks. Raises `CarillonError` when it does not answer."""
    return Ledger(Arrivals.load(_ask(port, "GET", "/_ledger")))


def fetch_counts(port: int) -> dict[str, int]:
    """The target's own figures, see `app.load.target`. Blocks. Raises `CarillonError` when it does not answer."""
    counts: dict[str, int] = json.loads(_ask(port, "GET", "/_count"))
    return counts


def reset_ledger(port: int) -> None:
    """Let the target forget what it has seen. Blocks. Raises `CarillonError` when it does not answer."""
    _ask(port, "POST", "/_reset")


def _ask(port: int, method: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(HOST, port, timeout=FETCH_LIMIT)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise CarillonError(f"the load target on port {port} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status >= 300:
        raise CarillonError(f"the load target on port {port} answered {answer.status} to {method} {path}")
    return body
