"""What is on the topic: every hint reads back as it was written, whatever else lies there is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.claim.kafka.hint import LONGEST, decode, encode
from app.domain.ids import EPOCH, RunId, ScheduleId, TenantId, microseconds, run_id
from app.domain.run import RunRef

AT = datetime(2026, 3, 29, 1, 0, 0, 250_000, tzinfo=UTC)
SCHEDULE = ScheduleId(UUID(int=7))
REF = RunRef(run_id(SCHEDULE, AT), TenantId(UUID(int=3)), AT, AT + timedelta(seconds=2))

instants = st.integers(0, 253_402_300_799_997_000).map(lambda micros: EPOCH + timedelta(microseconds=micros))


@st.composite
def refs(draw: st.DrawFn) -> RunRef:
    at = draw(instants)
    return RunRef(run_id(ScheduleId(draw(st.uuids())), at), TenantId(draw(st.uuids())), at, draw(instants))


def changed(**fields: object) -> bytes:
    """The value of a good hint with these fields instead; None leaves one out."""
    data = json.loads(encode(REF, shards=1)[1]) | fields
    return json.dumps({name: value for name, value in data.items() if value is not None}).encode()


@given(refs(), st.integers(1, 64))
def test_a_hint_reads_back_as_it_was_written(ref: RunRef, shards: int) -> None:
    key, value = encode(ref, shards=shards)
    assert decode(key, value) == ref
    assert len(value) <= LONGEST


@given(refs(), st.integers(2, 64))
def test_one_tenants_hints_are_spread_over_so_many_keys_and_no_more(ref: RunRef, shards: int) -> None:
    keys = {encode(replace(ref, id=RunId(UUID(int=ref.id.int + n))), shards=shards)[0] for n in range(200)}
    assert len(keys) == shards
    assert {key[:16] for key in keys} == {ref.tenant_id.bytes}


def test_without_shards_a_tenant_has_one_key() -> None:
    assert encode(REF, shards=1)[0] == REF.tenant_id.bytes


def test_a_value_says_version_run_and_two_instants_and_nothing_else() -> None:
    assert json.loads(encode(REF, shards=1)[1]) == {
        "v": 1,
        "run": str(REF.id),
        "at": microseconds(AT),
        "due": microseconds(AT) + 2_000_000,
    }


KEY, VALUE = encode(REF, shards=1)
LATER = microseconds(AT) + 60_000_000

MALFORMED: dict[str, tuple[bytes | None, bytes | None]] = {
    "no key": (None, VALUE),
    "no value": (KEY, None),
    "empty value": (KEY, b""),
    "empty key": (b"", VALUE),
    "short key": (KEY[:15], VALUE),
    "long key": (KEY + b"ab", VALUE),
    "a name as the key": (b"tenant-3", VALUE),
    "random bytes": (KEY, bytes(range(256))),
    "bytes of UTF-16": (KEY, VALUE.decode().encode("utf-16-le")[:-1]),
    "text": (KEY, b"hello"),
    "cut off": (KEY, VALUE[:-1]),
    "two values": (KEY, VALUE + VALUE),
    "a list": (KEY, b"[1, 2]"),
    "a number": (KEY, b"1"),
    "null": (KEY, b"null"),
    "NaN": (KEY, b"NaN"),
    "an empty object": (KEY, b"{}"),
    "huge": (KEY, VALUE[:-1] + b" " * 10_000_000 + b"}"),
    "just too long": (KEY, VALUE[:-1] + b" " * (LONGEST + 1 - len(VALUE)) + b"}"),
    "nested deeply": (KEY, b"[" * LONGEST),
    "nested very deeply": (KEY, b"[" * 1_000_000),
    "version 2": (KEY, changed(v=2)),
    "version 1.0": (KEY, changed(v=1.0)),
    "version true": (KEY, changed(v=True)),
    "version as text": (KEY, changed(v="1")),
    "no version": (KEY, changed(v=None)),
    "no run": (KEY, changed(run=None)),
    "a run as a number": (KEY, changed(run=7)),
    "a run that is no id": (KEY, changed(run="the first")),
    "a run of another instant": (KEY, changed(at=LATER)),
    "a run whose id has another version": (KEY, changed(run=str(UUID(int=REF.id.int ^ 0xC << 76)))),
    "no instant": (KEY, changed(at=None)),
    "not due": (KEY, changed(due=None)),
    "an instant as text": (KEY, changed(at=AT.isoformat())),
    "an instant with a fraction": (KEY, changed(at=microseconds(AT) + 0.5)),
    "an instant that is true": (KEY, changed(due=True)),
    "an instant that is NaN": (KEY, changed(due=float("nan"))),
    "an instant without end": (KEY, changed(due=float("inf"))),
    "an instant before 1970": (KEY, changed(due=-1)),
    "an instant after 9999": (KEY, changed(due=253_402_300_800_000_000)),
    "an instant with 200 digits": (KEY, changed(due=10**200)),
    "an instant as a list": (KEY, changed(due=[LATER])),
}


@pytest.mark.parametrize(("key", "value"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_hint_is_refused(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(key, value)


@given(st.binary(max_size=40) | st.just(KEY), st.binary(max_size=600))
def test_random_bytes_are_refused_and_nothing_worse(key: bytes, value: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(key, value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
usual = st.sampled_from([1, microseconds(AT), LATER, str(REF.id)])


@given(st.dictionaries(st.sampled_from(["v", "run", "at", "due", "x"]), usual | json_values))
def test_any_json_is_refused_or_read_as_what_it_says(data: dict[str, object]) -> None:
    value = json.dumps(data).encode()
    try:
        ref = decode(KEY, value)
    except ValueError:
        return
    said = json.loads(value)
    assert ref.tenant_id == REF.tenant_id
    assert ref.id == UUID(said["run"])
    assert [ref.scheduled_for, ref.fire_after] == [
        EPOCH + timedelta(microseconds=said[name]) for name in ("at", "due")
    ]


def test_the_tenant_is_whoever_the_key_names() -> None:
    """Whether the run is that tenant's, the claim finds out."""
    foreign = TenantId(UUID(int=99))
    assert decode(foreign.bytes, VALUE) == replace(REF, tenant_id=foreign)
