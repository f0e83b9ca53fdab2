"""Logging: one line per event on standard error, as JSON for machines or as text for people.

An event is a short constant with its facts beside it, `logger.info("run.settled", extra={"run_id": …})`, so that a
log can be searched without parsing prose. Facts use the words of the glossary (tenant_id, schedule_id, run_id,
attempt, loop, …) and must not be attribute names of `logging.LogRecord` (name, args, …), which the library refuses.
Nothing secret belongs in a log; as a last resort, credentials in URLs and facts with telling names are masked here.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TextIO

from app.settings import LogFormat, LogSettings

_OWN = "app"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "suppressed"}
_SECRET = re.compile(r"password|passwd|secret|admin_key|api_key|authorization|signature", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]*:[^\s@]*(?=@)")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MASK = "***"

_WARN_AT_MOST = ("aiokafka",)
"""Packages that call it an error when their server is away. What that means for us, we say ourselves."""

BURST = 20
BURST_SECONDS = 10.0
_KEYS_REMEMBERED = 1_000


def configure(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """Send every log record of the process to `stream` (standard error). Replaces what was configured before.

    The level is ours alone: other packages are heard from WARNING up, and each of their messages at most `BURST`
    times in `BURST_SECONDS` (a client whose server is away would write a hundred lines a second).
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format is LogFormat.JSON else TextFormatter())
    handler.addFilter(_lowered)
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_OWN).setLevel(settings.level.value.upper())
    logging.captureWarnings(capture=True)


def _lowered(record: logging.LogRecord) -> bool:
    if record.levelno > logging.WARNING and record.name.startswith(_WARN_AT_MOST):
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return True


class RateLimit(logging.Filter):
    """Lets one message template of a foreign logger through `burst` times per `seconds`, then counts the rest.

    The first record that passes again says how many were `suppressed`. Our own loggers are not limited: a loop
    that fails backs off by itself.
    """

    def __init__(
        self,
        *,
        burst: int = BURST,
        seconds: float = BURST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._burst = burst
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[tuple[str, int, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _OWN or record.name.startswith(_OWN + "."):
            return True
        key = (record.name, record.levelno, str(record.msg)[:200])
        now = self._clock()
        window = self._windows.get(key)
        if window is None or now >= window.until:
            suppressed = window.suppressed if window else 0
            if len(self._windows) >= _KEYS_REMEMBERED:
                self._windows.clear()
            self._windows[key] = _Window(now + self._seconds)
            if suppressed:
                record.suppressed = suppressed
            return True
        if window.passed < self._burst:
            window.passed += 1
            return True
        window.suppressed += 1
        return False


class _Window:
    __slots__ = ("passed", "suppressed", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.passed = 1
        self.suppressed = 0


class JsonFormatter(logging.Formatter):
    """{"at": "2026-…Z", "level": "info", "logger": "app.…", "event": "run.settled", …facts, "traceback": "…"}"""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _at(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": mask(record.getMessage()),
        }
        for name, value in _facts(record):
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[0] is not None:
            line["error_type"] = record.exc_info[0].__name__
            line["traceback"] = mask(self.formatException(record.exc_info))
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """12:00:00.123 info    app.main           replica.ready url=http://127.0.0.1:8080"""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_escaped(_plain(value))}" for name, value in _facts(record))
        line = (
            f"{_at(record)[11:23]} {record.levelname.lower():7} {_escaped(mask(record.getMessage()))}{facts}"
        )
        if record.exc_info and record.exc_info[0] is not None:
            return line + "\n" + mask(self.formatException(record.exc_info))
        return line


def mask(text: str) -> str:
    """`text` without the user names and passwords of URLs."""
    return _CREDENTIALS.sub(MASK, text)


def _facts(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    for name, value in vars(record).items():
        if name in _STANDARD:
            continue
        if _SECRET.search(name):
            yield name, MASK
        else:
            yield name, _masked(value)
    suppressed = getattr(record, "suppressed", None)
    if suppressed is not None:
        yield "suppressed", suppressed


def _at(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03}Z"


def _plain(value: object) -> str:
    try:
        return mask(str(value))
    except Exception:  # noqa: BLE001  a log line about a fault must not become another fault
        return f"<{type(value).__name__} without a text>"


def _masked(value: object) -> object:
    """`value` as JSON can carry it, with every text in it masked."""
    match value:
        case str():
            return mask(value)
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {
                str(name): MASK if _SECRET.search(str(name)) else _masked(item)
                for name, item in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_masked(item) for item in value]
        case _:
            return _plain(value)


def _escaped(text: str) -> str:
    """One line, whatever is in it: a target's words must not forge a log line."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
