"""Cursors: nothing is lost on the way, and nothing but our own text is taken."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import cursor
from app.api.cursor import Binding, Mark
from app.api.problems import ProblemError
from app.api.values import LATEST
from app.domain.ids import EPOCH, ScheduleId
from app.store.pool import Connection
from tests.api.conftest import Tenancy
from tests.factories_history import add_runs

BINDING = Binding(b"12345678")
INSTANTS = st.datetimes(EPOCH.replace(tzinfo=None), LATEST.replace(tzinfo=None), timezones=st.just(UTC))
MARKS = st.builds(Mark, INSTANTS, st.uuids(), INSTANTS, INSTANTS)


@given(MARKS)
def test_every_place_survives_to_the_microsecond(mark: Mark) -> None:
    text = cursor.write(mark, BINDING)
    assert cursor.read(text, BINDING) == mark
    assert text.isascii()
    assert len(text) <= 80


@given(MARKS, st.binary(min_size=8, max_size=8).filter(lambda digest: digest != BINDING.digest))
def test_a_cursor_of_another_list_is_refused(mark: Mark, digest: bytes) -> None:
    with pytest.raises(ProblemError):
        cursor.read(cursor.write(mark, Binding(digest)), BINDING)


@given(st.text(max_size=120) | st.text("ABCabc012-_=", min_size=60, max_size=80))
def test_no_text_but_ours_is_read(text: str) -> None:
    with pytest.raises(ProblemError):
        cursor.read(text, BINDING)


@pytest.mark.parametrize("instant", [datetime.max.replace(tzinfo=UTC), LATEST + timedelta(days=1)])
def test_a_forged_place_beyond_the_calendar_is_refused(instant: datetime) -> None:
    for mark in (Mark(at=instant), Mark(from_at=instant), Mark(to_at=instant)):
        with pytest.raises(ProblemError):
            cursor.read(cursor.write(mark, BINDING), BINDING)


async def test_a_forged_window_is_only_another_window_of_the_callers_own(
    tenant: Tenancy, other_tenant: Tenancy, db: Connection
) -> None:
    at = datetime(2026, 3, 31, 12, tzinfo=UTC)
    await add_runs(db, other_tenant.id, [(ScheduleId(uuid4()), at)])
    for mark in (
        Mark(LATEST, UUID(int=2**128 - 1), EPOCH, LATEST),
        Mark(EPOCH, UUID(int=0), LATEST, EPOCH),
        Mark(),
    ):
        text = cursor.write(mark, cursor.bind(tenant.id, "/v1/runs", []))
        response = await tenant.client.get("/v1/runs", params={"cursor": text})
        assert (response.status_code, response.json()["runs"]) == (200, [])
