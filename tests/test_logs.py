"""Logging: one line per event, facts beside it, nothing secret in it, and no foreign logger that drowns the rest."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr

from app import logs
from app.logs import RateLimit
from app.settings import LogFormat, LogLevel, LogSettings

SECRET_URL = "postgresql://carillon:CANARY-pass@db:5432/carillon"


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("app")
    handlers, level, own_level = root.handlers[:], root.level, own.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    own.setLevel(own_level)
    logging.captureWarnings(capture=False)


@pytest.fixture
def written(untouched_logging: None) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(LogSettings(level=LogLevel.INFO, format=LogFormat.JSON), stream=stream)
    return stream


@pytest.fixture
def text(untouched_logging: None) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(LogSettings(level=LogLevel.DEBUG, format=LogFormat.TEXT), stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object_with_its_facts(written: io.StringIO) -> None:
    run = UUID(int=7)
    logging.getLogger("app.executor").info(
        "run.settled", extra={"run_id": run, "attempt": 2, "roles": ["api", "planner"], "is_late": False}
    )
    [line] = lines(written)
    assert datetime.fromisoformat(line.pop("at")).tzinfo == UTC
    assert line == {
        "level": "info",
        "logger": "app.executor",
        "event": "run.settled",
        "run_id": str(run),
        "attempt": 2,
        "roles": ["api", "planner"],
        "is_late": False,
    }


def test_an_exception_comes_with_its_type_and_traceback(written: io.StringIO) -> None:
    try:
        raise OSError("no route")
    except OSError:
        logging.getLogger("app.loops").exception("loop.failed", extra={"loop": "planner"})
    [line] = lines(written)
    assert line["error_type"] == "OSError"
    assert "no route" in line["traceback"]
    assert line["level"] == "error"


def test_facts_cannot_replace_what_the_line_says_itself(written: io.StringIO) -> None:
    logging.getLogger("app").info("real", extra={"event": "forged", "level": "forged", "at": "forged"})
    [line] = lines(written)
    assert (line["event"], line["level"]) == ("real", "info")
    assert line["at"] != "forged"


@pytest.mark.parametrize("stream", ["written", "text"])
def test_no_secret_is_written(stream: str, request: pytest.FixtureRequest) -> None:
    written: io.StringIO = request.getfixturevalue(stream)
    logger = logging.getLogger("app.main")
    logger.info("connecting to %s", SECRET_URL)
    logger.info(
        "facts",
        extra={
            "dsn": SECRET_URL,
            "admin_key": "CANARY-key",
            "webhook_secret": "CANARY-hook",
            "Authorization": "Bearer CANARY",
            "nested": {"url": SECRET_URL, "password": "CANARY-nested", "list": [(SECRET_URL,)]},
            "wrapped": SecretStr("CANARY-wrapped"),
            "error": ValueError(SECRET_URL),
        },
    )
    try:
        raise RuntimeError(f"cannot reach {SECRET_URL}")
    except RuntimeError:
        logger.exception("failed")
    assert "CANARY" not in written.getvalue()
    assert "db:5432/carillon" in written.getvalue()


@pytest.mark.parametrize("stream", ["written", "text"])
def test_a_fact_cannot_forge_a_line(stream: str, request: pytest.FixtureRequest) -> None:
    written: io.StringIO = request.getfixturevalue(stream)
    evil = "x\n12:00 error forged\r\x1b[2J\u2028\ud800"
    logging.getLogger("app").info("event %s", evil, extra={"excerpt": evil})
    assert len(written.getvalue().splitlines()) == 1
    assert "\x1b" not in written.getvalue()
    written.getvalue().encode()


def test_a_fact_that_cannot_be_written_does_not_lose_the_line(written: io.StringIO) -> None:
    class Awkward:
        def __str__(self) -> str:
            raise ValueError

    logging.getLogger("app").info("event", extra={"awkward": Awkward(), "ratio": float("nan")})
    [line] = lines(written)
    assert line["awkward"] == "<Awkward without a text>"
    assert line["ratio"] == "nan"


def test_text_is_for_people(text: io.StringIO) -> None:
    logging.getLogger("app.main").info("replica.ready", extra={"url": "http://127.0.0.1:8080"})
    assert text.getvalue().endswith(" info    replica.ready url=http://127.0.0.1:8080\n")


def test_the_level_is_ours_and_others_are_heard_from_warning_up(written: io.StringIO) -> None:
    logging.getLogger("app").debug("too.small")
    logging.getLogger("app").info("heard")
    logging.getLogger("aiohttp.client").info("not heard")
    logging.getLogger("aiohttp.client").warning("heard too")
    assert [line["event"] for line in lines(written)] == ["heard", "heard too"]


def test_a_noisy_foreign_logger_is_cut_short_and_says_so_later() -> None:
    now = [0.0]
    limit = RateLimit(burst=3, seconds=10, clock=lambda: now[0])

    def is_passed(name: str, message: str) -> bool:
        record = logging.LogRecord(name, logging.WARNING, "", 0, message, None, None)
        suppressed.append(getattr(record, "suppressed", None))
        passed = bool(limit.filter(record))
        suppressed[-1] = getattr(record, "suppressed", None)
        return passed

    suppressed: list[int | None] = []
    assert [is_passed("client", "down") for _ in range(100)] == [True] * 3 + [False] * 97
    assert is_passed("client", "another message")
    assert is_passed("another", "down")
    assert all(is_passed("app.claim", "ours") for _ in range(100))
    now[0] = 11
    suppressed.clear()
    assert is_passed("client", "down")
    assert is_passed("client", "down")
    assert suppressed == [97, None]


def test_the_memory_of_the_limit_is_bounded() -> None:
    limit = RateLimit(burst=1, seconds=10, clock=lambda: 0.0)
    for number in range(10_000):
        limit.filter(logging.LogRecord("client", logging.WARNING, "", 0, f"message {number}", None, None))
    assert len(limit._windows) <= 1_000


def test_how_much_was_suppressed_is_written(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("client", logging.WARNING, "", 0, "down", None, None)
    record.suppressed = 97
    logging.getLogger("client").handle(record)
    assert lines(written)[0]["suppressed"] == 97


def test_a_client_whose_server_is_away_is_a_warning_not_an_error(written: io.StringIO) -> None:
    for name in ("aiokafka.consumer.fetcher", "other"):
        logging.getLogger(name).error("down")
        logging.getLogger(name).warning("slow")
    assert [(line["logger"][:5], line["level"]) for line in lines(written)] == [
        ("aioka", "warning"),
        ("aioka", "warning"),
        ("other", "error"),
        ("other", "warning"),
    ]
