"""What the receiver does with a request: answer, answer slowly, never answer, or hang up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from app.local.ledger import Received

NOW = timedelta(0)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer after `delay`. Without a `body` it is a small JSON that echoes the request."""

    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    delay: timedelta = NOW


@dataclass(frozen=True, slots=True)
class Drip:
    """The head of an answer at once, then its body one byte at a time, one each `every`."""

    body: bytes
    every: timedelta
    status: int = 200


@dataclass(frozen=True, slots=True)
class Hang:
    """No answer; the connection stays open until the other side gives up."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Send these bytes as they are, which may be half an answer or none of it, then close the connection."""

    sent: bytes = b""


Answer = Reply | Drip | Hang | Cut

ECHO = Reply()


@dataclass(slots=True)
class Script:
    """Which answer comes next, by the longest prefix of the path; without one, ECHO.

    A sequence is walked once and its last answer repeats for ever.
    """

    _shared: dict[str, tuple[Answer, ...]] = field(default_factory=dict)
    _each: dict[str, tuple[Answer, ...]] = field(default_factory=dict)
    _seen: Counter[tuple[str, str | None]] = field(default_factory=Counter)

    def answer(self, prefix: str, *answers: Answer) -> None:
        """All requests below `prefix` walk through `answers` together. Replaces what was said for this prefix."""
        self._replace(prefix, answers, into=self._shared)

    def answer_each(self, prefix: str, *answers: Answer) -> None:
        """Each delivery id walks through `answers` by itself. Replaces what was said for this prefix."""
        self._replace(prefix, answers, into=self._each)

    def choose(self, received: Received) -> Answer:
        """The answer for this request; takes one step in its sequence."""
        if not self._shared and not self._each:
            return ECHO
        prefix = _longest(received.path, (*self._shared, *self._each))
        if prefix is None:
            return ECHO
        key: tuple[str, str | None]
        if prefix in self._shared:
            answers, key = self._shared[prefix], (prefix, None)
        else:
            answers, key = self._each[prefix], (prefix, received.delivery_id or "")
        step = self._seen[key]
        self._seen[key] = step + 1
        return answers[min(step, len(answers) - 1)]

    def _replace(
        self, prefix: str, answers: tuple[Answer, ...], *, into: dict[str, tuple[Answer, ...]]
    ) -> None:
        if not answers:
            raise ValueError("at least one answer")
        for places in (self._shared, self._each):
            places.pop(prefix, None)
        for key in [key for key in self._seen if key[0] == prefix]:
            del self._seen[key]
        into[prefix] = answers


def _longest(path: str, prefixes: Iterable[str]) -> str | None:
    return max((prefix for prefix in prefixes if path.startswith(prefix)), key=len, default=None)
