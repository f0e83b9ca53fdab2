"""How single values are written and checked: durations, secret files, the database's URL, the admin key.

A check raises ValueError with the end of a sentence that begins with the variable's name ("is not a
duration"). It never repeats the value: what was put into the wrong variable may be a secret.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr

_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86_400)}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?(ms|s|m|h|d)?", re.ASCII)


class Allowed(str):
    """In a field's annotation: what is allowed, in words, where bounds and types do not say it."""

    __slots__ = ()


def parse_duration(value: object) -> object:
    """Turns "0.5", "500ms", "5s", "2m", "1h" or "30d" into a timedelta; a bare number is seconds."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError("is not a duration")
    seconds = Decimal(match[1]) * _UNITS[match[2] or "s"]
    return timedelta(microseconds=int(seconds * 1_000_000))


def duration_text(value: timedelta) -> str:
    """The shortest way to write a duration that `parse_duration` reads back: 25s, 500ms, 1h."""
    micros = value // timedelta(microseconds=1)
    for unit in ("d", "h", "m", "s", "ms"):
        size = int(_UNITS[unit] * 1_000_000)
        if micros >= size and micros % size == 0 and micros // size < 10**9:  # no more digits than are read
            return f"{micros // size}{unit}"
    return f"{micros // 1_000_000}.{micros % 1_000_000:06}".rstrip("0").rstrip(".") + "s"


def _read_secret_file(path: str) -> str:
    """The first 4 KiB of the file, stripped. The path is not repeated: it may be the secret itself."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(4096).decode()
    except UnicodeDecodeError:
        raise ValueError("names a file that is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise ValueError(f"names a file that cannot be read ({reason})") from None
    return text.strip()


def _check_admin_key(value: SecretStr) -> SecretStr:
    key = value.get_secret_value()
    if not 16 <= len(key) <= 512:
        raise ValueError(f"is {len(key)} characters long")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("has characters that an HTTP header cannot carry safely")
    return value


def _check_database_url(value: SecretStr) -> SecretStr:
    url = value.get_secret_value()
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError("has white space or control characters in it; percent-encode them")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in {"postgres", "postgresql"}:
        raise ValueError("does not begin with postgresql://")
    hosts = parts.netloc.rpartition("@")[2]
    rest = url.partition("://")[2].removeprefix(parts.netloc)
    if "@" in rest or "#" in rest or not all(_is_host(host) for host in hosts.split(",")):
        raise ValueError("is not well-formed; in a user name or password, percent-encode / ? # @ : and %")
    return value


def _is_host(text: str) -> bool:
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[^\[\]:@]*)(?::(\d{1,5}))?", text, re.ASCII)
    return match is not None and (match[1] is None or 1 <= int(match[1]) <= 65_535)


def _check_servers(value: str) -> str:
    servers = value.split(",")
    if not all(
        re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):\d{1,5}", one, re.ASCII)
        for one in servers
    ):
        raise ValueError("is not a list of host:port")
    if not all(1 <= int(one.rpartition(":")[2]) <= 65_535 for one in servers):
        raise ValueError("names a port that does not exist")
    return value


def _check_kafka_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", value, re.ASCII) or value in {".", ".."}:
        raise ValueError("is not a name that Kafka takes")
    return value


def _check_password(value: SecretStr) -> SecretStr:
    if not value.get_secret_value():
        raise ValueError("names an empty file")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
DatabaseUrl = Annotated[
    SecretStr,
    AfterValidator(_check_database_url),
    Allowed("`postgresql://user:password@host:port/database`"),
]
AdminKey = Annotated[
    SecretStr,
    AfterValidator(_check_admin_key),
    Allowed("16 to 512 printable ASCII characters without spaces"),
]
SecretFile = Annotated[
    SecretStr,
    BeforeValidator(_read_secret_file),
    AfterValidator(_check_admin_key),
    Allowed("the path of a readable file that holds 16 to 512 printable ASCII characters without spaces"),
]
KafkaServers = Annotated[
    str, AfterValidator(_check_servers), Allowed("`host:port`, several separated by commas")
]
KafkaName = Annotated[
    str, AfterValidator(_check_kafka_name), Allowed("1 to 249 letters, digits, dots, dashes and underscores")
]
Password = Annotated[SecretStr, Allowed("any text")]
PasswordFile = Annotated[
    SecretStr,
    BeforeValidator(_read_secret_file),
    AfterValidator(_check_password),
    Allowed("the path of a readable file that holds the password"),
]
