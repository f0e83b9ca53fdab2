"""The settings in words: one entry per variable, the reference page made of them, and the values in force."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from app.settings.groups import Settings, variable
from app.settings.values import Allowed, duration_text


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting in words. `group` is "" for those of the whole process."""

    group: str
    field: str
    variable: str
    meaning: str
    default: str
    allowed: str


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every setting, in the order of the classes; those without a group first."""
    alone = [("", name, field) for name, field in Settings.model_fields.items() if not _group_of(field)]
    grouped = [
        (group, name, field)
        for group, holder in Settings.model_fields.items()
        for name, field in _fields_of(holder).items()
    ]
    return tuple(_entry(group, name, field) for group, name, field in alone + grouped)


def describe() -> str:
    """docs/configuration.md."""
    return "\n".join(_page()) + "\n"


def in_force(settings: Settings) -> list[tuple[str, str]]:
    """(variable, value) of every setting as it is now; secrets are only said to be set, but where the database is."""
    values = {entry.variable: _shown(_value(settings, entry)) for entry in entries()}
    values[variable("database", "url")] = f"(set: {settings.database.shown}; the rest is not shown)"
    return list(values.items())


_INTRODUCTION = """\
# Configuration

<!-- Made by `carillon check-config --reference`; a test compares. -->

Everything is set by environment variables. An unknown `SCHEDULER_…` name, an empty value or a value outside
of what is allowed stops the start with exit status 2 and one line for every fault; `carillon check-config`
tells without starting. White space around a value is ignored. Durations are written `500ms`, `5s`, `2m`, `1h`
or `30d`; a bare number (`0.5`) is seconds.
"""

_TOGETHER = """
These belong together and are checked together:

* `SCHEDULER_EXECUTOR_DRAIN_GRACE` is at least `SCHEDULER_EXECUTOR_DELIVERY_TIMEOUT` + 5s, and whatever stops
  the process from outside (a pod's termination grace) waits longer than that.
* `SCHEDULER_PLANNER_LOOKAHEAD` and `SCHEDULER_PLANNER_MISFIRE_GRACE` are at least `SCHEDULER_PLANNER_TICK`;
  `SCHEDULER_PLANNER_ROWS_PER_BATCH` is at least `SCHEDULER_PLANNER_BATCH`.
* Of `SCHEDULER_API_ADMIN_KEY` and `SCHEDULER_API_ADMIN_KEY_FILE` at most one is set.

A lease lasts twice the delivery timeout and is extended every third of its length; neither has a setting.
Names that Kubernetes adds beside a Service (`SCHEDULER_…_SERVICE_HOST` and the like) are not settings and are
passed over.
"""


def _page() -> Iterator[str]:
    yield _INTRODUCTION.rstrip("\n")
    last = None
    for entry in entries():
        if entry.group != last:
            last = entry.group
            yield from _heading(entry.group)
        cells = (f"`{entry.variable}`", entry.meaning, entry.default, entry.allowed)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield _TOGETHER.rstrip("\n")


def _heading(group: str) -> Iterator[str]:
    if group:
        kind = _group_of(Settings.model_fields[group])
        title, text = group.capitalize(), (kind.__doc__ if kind else None) or ""
    else:
        title, text = "The whole process", "What every part shares."
    yield from ("", f"## {title}", "", text.strip(), "")
    yield from ("| Variable | Meaning | Default | Allowed |", "|---|---|---|---|")


def _entry(group: str, name: str, field: FieldInfo) -> Entry:
    path = (group, name) if group else (name,)
    return Entry(group, name, variable(*path), field.description or "", _default(field), _allowed(field))


def _group_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _fields_of(holder: FieldInfo) -> dict[str, FieldInfo]:
    kind = _group_of(holder)
    return kind.model_fields if kind else {}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "the host's name"
    return "none" if field.default is None else f"`{_text(field.default)}`"


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case timedelta():
            return duration_text(value)
        case frozenset():
            return ",".join(word for word in _words(type(next(iter(value)))) if word in value)
        case _:
            return str(value)


def _allowed(field: FieldInfo) -> str:
    kind, metadata = _bare(field)
    for item in metadata:
        if isinstance(item, Allowed):
            return str(item)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _listed(_words(kind))
    if kind is bool:
        return "`true` or `false`"
    if kind is str:
        return _text_length(metadata)
    noun = {int: "a whole number", float: "a number", timedelta: "a duration"}[kind]
    low = next(item.ge for item in metadata if isinstance(item, annotated_types.Ge))
    high = next(item.le for item in metadata if isinstance(item, annotated_types.Le))
    return f"{noun} from {_text(low)} to {_text(high)}"


def _bare(field: FieldInfo) -> tuple[Any, list[Any]]:
    """The type and its metadata, also from within `Annotated[…] | None`."""
    kind, metadata = field.annotation, list(field.metadata)
    if get_origin(kind) in {Union, UnionType}:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if hasattr(kind, "__metadata__"):
        kind, *more = get_args(kind)
        metadata += more
    return kind, metadata


def _words(kind: type) -> list[str]:
    return [str(member) for member in kind] if issubclass(kind, StrEnum) else []


def _listed(words: list[str]) -> str:
    quoted = [f"`{word}`" for word in words]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def _text_length(metadata: list[Any]) -> str:
    longest = next((item.max_length for item in metadata if isinstance(item, annotated_types.MaxLen)), 63)
    return f"1 to {longest} characters"


def _value(settings: Settings, entry: Entry) -> object:
    holder = getattr(settings, entry.group) if entry.group else settings
    return getattr(holder, entry.field)


def _shown(value: object) -> str:
    match value:
        case None:
            return "(not set)"
        case SecretStr():
            return "(set, not shown)"
        case _:
            return _text(value)
