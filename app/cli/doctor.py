"""`carillon doctor`: what keeps this installation from working, one line per look. Changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from app.errors import CarillonError, ConfigError
from app.settings import ClaimMode, KafkaSettings, Settings, load_settings
from app.store import migrations, partitions
from app.store.planning import database_now
from app.store.pool import Connection, close, connect, translated

OLDEST_POSTGRES = 15
CLOCK_TOLERANCE = timedelta(seconds=2)
"""The bound of ADR 0033 for the alert on clock skew."""
HORIZON_WANTED = timedelta(days=10)
"""Less than this before the last month ends, and maintenance has failed for weeks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One look: what was looked at, and what is wrong with it or how it is."""

    subject: str
    is_good: bool
    text: str

    def __str__(self) -> str:
        word = "OK  " if self.is_good else "FAIL"
        return f"{word} {self.subject}: " + self.text.replace("\n", "\n     ")


async def examine(environ: Mapping[str, str] | None = None) -> AsyncIterator[Finding]:
    """Look at everything that can be looked at; a look that needs a failed one before it is left out."""
    try:
        settings = load_settings(environ)
    except ConfigError as error:
        yield Finding("configuration", is_good=False, text=str(error))
        return
    roles = ", ".join(sorted(settings.roles))
    yield Finding("configuration", is_good=True, text=f"complete; this replica would be {roles}")
    async for finding in _examine_database(settings):
        yield finding
    if settings.claim.mode is ClaimMode.KAFKA:
        yield await _broker(settings.kafka)


async def _examine_database(settings: Settings) -> AsyncIterator[Finding]:
    try:
        conn = await connect(settings.database.dsn, application_name="carillon doctor")
    except CarillonError as error:
        yield Finding("database", is_good=False, text=f"{settings.database.shown}: {error}")
        return
    try:
        with translated():
            async for finding in _examine_connected(conn, settings):
                yield finding
    except CarillonError as error:
        yield Finding("database", is_good=False, text=f"{settings.database.shown}: {error}")
    finally:
        await close(conn)


async def _examine_connected(conn: Connection, settings: Settings) -> AsyncIterator[Finding]:
    version = _version(conn, settings)
    yield version
    yield await _clock(conn)
    if not version.is_good:
        return
    schema = await _schema(conn)
    yield schema
    if schema.is_good:
        yield await _months(conn)


def _version(conn: Connection, settings: Settings) -> Finding:
    version = conn.get_server_version()
    # The server's own word, up to what a distribution adds: the driver counts 18.6 as 18.0.6.
    named = conn.get_settings().server_version.split()[0]
    place = f"{settings.database.shown} answers, PostgreSQL {named}"
    if version.major < OLDEST_POSTGRES:
        return Finding("database", is_good=False, text=f"{place}; {OLDEST_POSTGRES} or newer is needed")
    return Finding("database", is_good=True, text=place)


async def _clock(conn: Connection) -> Finding:
    asked_at = datetime.now(UTC)
    there = await database_now(conn)
    here = asked_at + (datetime.now(UTC) - asked_at) / 2
    skew = here - there
    text = f"this machine's clock is {skew.total_seconds():+.3f} s off the database's"
    if abs(skew) > CLOCK_TOLERANCE:
        return Finding(
            "clock", is_good=False, text=f"{text}; more than {CLOCK_TOLERANCE.seconds} s is too much"
        )
    return Finding("clock", is_good=True, text=text)


async def _schema(conn: Connection) -> Finding:
    try:
        await migrations.require_current(conn)
    except CarillonError as error:
        return Finding("schema", is_good=False, text=str(error))
    return Finding("schema", is_good=True, text="that of this version")


async def _months(conn: Connection) -> Finding:
    now = await database_now(conn)
    end = await partitions.horizon(conn, now=now)
    if end is None:
        return Finding("months", is_good=False, text="there is none for runs of now; does maintenance run?")
    text = f"runs can be written until {end:%Y-%m-%d}"
    if end - now < HORIZON_WANTED:
        return Finding("months", is_good=False, text=f"{text}, that is soon; does maintenance run?")
    return Finding("months", is_good=True, text=text)


async def _broker(kafka: KafkaSettings) -> Finding:
    # Imported only when chosen: in postgres mode nobody pays for the client.
    from app.claim.kafka.state import look_at_topic

    place = f"{kafka.servers}, topic {kafka.topic}"
    try:
        state = await look_at_topic(kafka)
    except CarillonError as error:
        return Finding("broker", is_good=False, text=f"{place}: {error}; until it works, runs fire late")
    if state.partitions == 0:
        if kafka.create_topic:
            return Finding("broker", is_good=True, text=f"{place}: not there yet, the first replica makes it")
        return Finding(
            "broker",
            is_good=False,
            text=f"{place}: there is no such topic, and SCHEDULER_KAFKA_CREATE_TOPIC is false; make it with "
            f"{kafka.partitions} partitions, or allow it to be made",
        )
    return Finding(
        "broker",
        is_good=True,
        text=f"{place}: {state.partitions} partitions, group {kafka.group} lags by {state.lag} hints",
    )
