"""From the environment to `Settings`, or to one error that names every fault by its variable."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from app.errors import ConfigError
from app.settings.groups import PREFIX, Settings, variable
from app.settings.reference import Entry, entries

_SERVICE_LINK = re.compile(
    r"(?:[A-Z0-9_]+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_[A-Z]+)?)"
)
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://")
_SERVICE_LINK_HINT = (
    "looks like the address that Kubernetes gives to the pods beside a Service of this name: "
    "set enableServiceLinks: false in the pod"
)

_FAULTS = {
    "missing": "is required",
    "int_parsing": "is not a whole number",
    "int_parsing_size": "is not a whole number of a sane size",
    "float_parsing": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither true nor false",
    "enum": "is not one of the known words",
    "greater_than_equal": "is too small",
    "less_than_equal": "is too large",
    "string_too_long": "is too long",
    "string_pattern_mismatch": "has characters that are not allowed, or is too long",
}


def load_settings(
    environ: Mapping[str, str] | None = None, *, overrides: Mapping[str, str] | None = None
) -> Settings:
    """Reads the process's environment, or `environ` instead of it; `overrides` (by variable) win over both.

    White space around a value is ignored. Raises ConfigError with one line for every fault there is: the
    variable, what is wrong with its value, and what is allowed. Values are never repeated, since any may hold
    a secret.
    """
    given = {**(os.environ if environ is None else environ), **(overrides or {})}
    known = {entry.variable: entry for entry in entries()}
    problems: dict[str, str] = {}
    values: dict[str, str] = {}
    for name, value in given.items():
        if not name.upper().startswith(PREFIX) or _is_service_link(name, value, known):
            continue
        problem = _unknown(name, known) or _unreadable(value, known[name])
        if problem is None:
            values[name] = value.strip()
        else:
            problems[name] = problem
    try:
        settings = Settings.model_validate(_Variables(values)())
    except ValidationError as error:
        for name, text in _faults(error, known):
            problems.setdefault(name, text)
    else:
        if not problems:
            return settings
    raise ConfigError(_message([problems[name] for name in sorted(problems)]))


class _Variables(EnvSettingsSource):
    """The environment source of pydantic-settings, reading the given variables instead of the process's."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(Settings)
        self.env_vars = {name.lower(): value for name, value in values.items()}


def _is_service_link(name: str, value: str, known: Mapping[str, Entry]) -> bool:
    """Kubernetes puts such variables into every pod beside a Service called scheduler-…: not ours."""
    if name in known:
        return False
    rest = name.removeprefix(PREFIX)
    return bool(
        _SERVICE_LINK.fullmatch(rest)
        or (re.fullmatch(r"(?:[A-Z0-9_]+_)?PORT", rest) and _SERVICE_ADDRESS.match(value))
    )


def _unknown(name: str, known: Mapping[str, Entry]) -> str | None:
    if name in known:
        return None
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = name if name.isascii() and name.isprintable() and len(name) <= 100 else ascii(name)[:100]
    return f"{shown}: there is no such setting{hint}"


def _unreadable(value: str, entry: Entry) -> str | None:
    if not value.strip():
        return f"{entry.variable}: is empty; unset it or give it a value. Allowed: {entry.allowed}"
    if any("\ud800" <= char <= "\udfff" for char in value):
        return f"{entry.variable}: is not UTF-8 text. Allowed: {entry.allowed}"
    if "\x00" in value:
        return f"{entry.variable}: has a NUL character in it. Allowed: {entry.allowed}"
    if entry.variable == variable("api", "port") and _SERVICE_ADDRESS.match(value):
        return f"{entry.variable}: {_SERVICE_LINK_HINT}. Allowed: {entry.allowed}"
    return None


def _faults(error: ValidationError, known: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
    """(variable, line) of every fault. A fault of a whole group names its variables in its own text."""
    for details in error.errors(include_url=False, include_input=False):
        entry = _entry_of(details, known)
        if entry is not None:
            yield entry.variable, f"{entry.variable}: {_fault(details)}. Allowed: {entry.allowed}"
            continue
        for line in _fault(details).splitlines():
            yield line, line


def _entry_of(details: ErrorDetails, known: Mapping[str, Entry]) -> Entry | None:
    path = [str(part) for part in details["loc"]]
    if path == ["database"]:
        path = ["database", "url"]  # nothing of the group was set, and this is what it cannot do without
    for length in (2, 1):
        entry = known.get(variable(*path[:length]))
        if entry is not None:
            return entry
    return None


def _fault(details: ErrorDetails) -> str:
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    problem = _FAULTS.get(details["type"], "is not allowed")
    place = details["loc"][-1]
    # Of a list, the place of the word: the word itself is never repeated.
    return f"word {place + 1} of it {problem}" if isinstance(place, int) else problem


def _message(lines: Collection[str]) -> str:
    count = "one fault" if len(lines) == 1 else f"{len(lines)} faults"
    text = "\n".join([f"the configuration has {count}:", *(f"  {line}" for line in lines)])
    return text.replace("`", "")  # the marks are for the reference page
