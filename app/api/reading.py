"""Reading a request's JSON body, strictly. What is accepted here is safe to hand to the domain and to the
database.

Python's own reader takes NaN, keeps the last of two equal keys, lets `\\ud800` through (which no UTF-8 can
hold) and spends seconds on a number of a million digits; PostgreSQL's jsonb has no place for NUL. All of it
is refused here, for every route, before anything else looks at the body.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any, NoReturn

from fastapi import Depends, Request
from starlette.datastructures import QueryParams

from app.api.problems import FAULTS_SHOWN, Fault, ProblemError, pointer_of

BODY_DEADLINE = timedelta(seconds=30)
DEPTH_LIMIT = 16
VALUE_LIMIT = 2_000
"""Values and names in one body; the largest that means anything has about a hundred. They are read, checked and
refused on the loop that also delivers, and a megabyte of empty objects would stop it for seconds."""
PARAMETER_LIMIT = 100
"""Parameters in one query; the server that reads it has no bound of its own."""
NUMBER_DIGITS = 40
INTEGER_LIMIT = 2**53
"""Beyond it JSON numbers are not exact everywhere (RFC 8259, section 6)."""


class StrictRequest(Request):
    """A request whose body is bounded in size and time and whose JSON is unambiguous."""

    @property
    def query_params(self) -> QueryParams:
        """The query. Raises ProblemError (400) when it has too many parameters to look at each."""
        if self.scope["query_string"].count(b"&") >= PARAMETER_LIMIT:
            _malformed(f"the query has more than {PARAMETER_LIMIT} parameters")
        return super().query_params

    async def body(self) -> bytes:
        """The whole body. Raises ProblemError: 408 too slow, 413 too large, 415 not JSON."""
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def json(self) -> Any:
        """The body as data. Raises ProblemError: 400 unreadable, 422 text that cannot be stored."""
        data = _parse(await self.body())
        _refuse_unstorable(data)
        return data

    async def _read(self) -> bytes:
        limit: int = self.app.state.deps.settings.max_body_bytes
        announced = self.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
            _refuse_size(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_DEADLINE.total_seconds()):
                async for chunk in self.stream():
                    body += chunk
                    if len(body) > limit:
                        _refuse_size(limit)
        except TimeoutError:
            raise ProblemError(
                "body-timeout",
                f"the body must arrive within {BODY_DEADLINE.total_seconds():g} s",
                headers={"Connection": "close"},
            ) from None
        if body:
            self._check_media_type()
        return bytes(body)

    def _check_media_type(self) -> None:
        kind, _, parameters = self.headers.get("content-type", "").partition(";")
        charset = parameters.lower().replace(" ", "").replace('"', "")
        if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
            raise ProblemError("unsupported-media-type", "Content-Type must be application/json (UTF-8)")
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise ProblemError("unsupported-media-type", "the body must not have a Content-Encoding")


async def _refuse_body(request: Request) -> None:
    """For routes that take no body: an empty object is none, anything else was meant to do something.

    Raises ProblemError (422).
    """
    if not await request.body() or (given := await request.json()) == {}:
        return
    names = list(given) if isinstance(given, dict) else []
    faults = [Fault(name, "there is no such field") for name in names]
    raise ProblemError(
        "invalid-input", "this takes no body", faults=faults or [Fault("", "must be left out")]
    )


NO_BODY = Depends(_refuse_body)


def _refuse_size(limit: int) -> NoReturn:
    # Whoever sends more than that is not read to the end: the connection cannot be used again.
    detail = f"at most {limit} bytes are allowed"
    raise ProblemError("body-too-large", detail, headers={"Connection": "close"})


# What JSON counts as a value or a name: a text, an object or list as it opens, a number or a word. Each way begins
# with another character and none goes back on what it took, so any bytes are read in one pass.
_VALUE = re.compile(rb""""(?:[^"\\]++|\\.)*+"?+|[\[{]|[^\s"\[\]{},:]++""", re.DOTALL)


def _parse(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _malformed(f"the body is not UTF-8 (byte {error.start})")
    if next(islice(_VALUE.finditer(body), VALUE_LIMIT, None), None) is not None:
        _malformed(f"the body has more than {VALUE_LIMIT} values and names")
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except json.JSONDecodeError as error:
        _malformed(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})")
    except RecursionError:
        _malformed(f"the body is nested more than {DEPTH_LIMIT} deep")


def _malformed(detail: str) -> NoReturn:
    raise ProblemError("malformed-request", detail) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        _malformed(f"the key {ascii(twice)[:60]} is there twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    _malformed(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > NUMBER_DIGITS or abs(number := int(digits)) > INTEGER_LIMIT:
        _malformed(f"the number {digits[:20]}… is outside ±2^53")
    return number


def _number(digits: str) -> float:
    if len(digits) > NUMBER_DIGITS or not math.isfinite(number := float(digits)):
        _malformed(f"the number {digits[:20]}… is outside what JSON numbers can hold everywhere")
    return number


def _refuse_unstorable(data: Any) -> None:
    faults = list(islice(_unstorable(data), FAULTS_SHOWN + 1))
    if faults:
        raise ProblemError("invalid-input", f"{faults[0].field}: {faults[0].detail}", faults=faults)


def _unstorable(data: Any) -> Iterator[Fault]:
    for path, text in _texts(data):
        if "\0" in text:
            yield _fault(path, "must not contain the NUL character")
        elif not _is_unicode(text):
            yield _fault(path, "must not contain unpaired surrogates")


def _texts(data: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text in `data` with its path; of a key, the path is that of its object."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict | list):
            if len(path) >= DEPTH_LIMIT:
                _malformed(f"the body is nested more than {DEPTH_LIMIT} deep (at {pointer_of(path)[:200]})")
            if isinstance(value, dict):
                for key, inner in value.items():
                    yield path, key
                    waiting.append(((*path, key), inner))
            else:
                waiting.extend(((*path, str(index)), inner) for index, inner in enumerate(value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fault(path: tuple[str, ...], detail: str) -> Fault:
    return Fault(".".join(path), detail)
