"""Exactly once or not, and how late: what is made of the target's arrivals."""

from __future__ import annotations

from array import array
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import CarillonError
from app.load.arrivals import NO_KEY, Arrivals
from app.load.lateness import Lateness
from app.load.ledger import Ledger, fetch_counts, lateness_of

SECOND = 1_000_000_000
DUE = 1_800_000_000 * SECOND
A, B, C = (UUID(int=number).bytes for number in (1, 2, 3))


def ledger(*arrived: tuple[int, bytes]) -> Ledger:
    arrivals = Arrivals()
    for arrived_ns, key in arrived:
        arrivals.add(arrived_ns, key)
    return Ledger(arrivals)


def test_duplicates_are_the_requests_beyond_the_first_of_each_delivery() -> None:
    seen = ledger((5, A), (6, B), (7, A), (4, A), (8, NO_KEY), (9, C))
    assert (seen.requests, seen.distinct, seen.duplicates, seen.unidentified) == (6, 3, 2, 1)
    assert seen.first == {A: 4, B: 6, C: 9}
    assert seen.repeated() == {A: 3}
    assert seen.span_ns() == (4, 9)


def test_of_an_empty_ledger_everything_can_be_asked_but_its_span() -> None:
    seen = ledger()
    assert (seen.requests, seen.distinct, seen.duplicates, seen.unidentified) == (0, 0, 0, 0)
    assert (seen.first, seen.repeated(), seen.series(begin_ns=DUE)) == ({}, {}, [])
    with pytest.raises(CarillonError, match="received nothing"):
        seen.span_ns()


def test_the_series_counts_steps_from_the_instant_also_empty_ones() -> None:
    step = SECOND // 10
    seen = ledger((DUE - 1, A), (DUE, B), (DUE + step - 1, C), (DUE + 3 * step, A))
    assert seen.series(begin_ns=DUE) == [3, 0, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 2**62), st.binary(min_size=16, max_size=16))))
def test_a_dump_is_read_as_it_was_written(arrived: list[tuple[int, bytes]]) -> None:
    written = ledger(*arrived).arrivals
    read = Arrivals.load(written.dump())
    assert (read.times, read.keys) == (written.times, written.keys)


@pytest.mark.parametrize("change", [lambda dump: dump[:-1], lambda dump: b"X" + dump[1:], lambda dump: b""])
def test_a_dump_that_is_cut_short_or_something_else_is_refused(change: object) -> None:
    assert callable(change)
    with pytest.raises(CarillonError, match="cannot be read"):
        Arrivals.load(change(ledger((5, A)).arrivals.dump()))


def test_lateness_is_the_first_byte_minus_the_instant_by_one_clock() -> None:
    first = {A: DUE + 2_000_000, B: DUE + 4_000_000}
    assert lateness_of(first, DUE).percentiles()["max"] == 4.0
    assert lateness_of(first, DUE, offset_ns=1_000_000).percentiles()["max"] == 3.0
    own = lateness_of(first, {A: DUE + 1_000_000, C: DUE})
    assert (own.count, own.percentiles()["p50"]) == (1, 1.0)


@given(st.lists(st.integers(0, 3_600_000_000), min_size=1, max_size=300))
def test_percentiles_are_those_of_the_sorted_values_to_three_digits(late_us: list[int]) -> None:
    found = Lateness(array("q", [us * 1000 for us in late_us])).percentiles()
    in_order = sorted(late_us)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        exact = in_order[min(len(in_order) - 1, max(0, round(share * len(in_order) + 0.5) - 1))]
        near = [in_order[max(0, in_order.index(exact) - 1)], exact]  # ranks are rounded
        value = found[name]
        assert value is not None
        assert near[0] / 1000 * 0.999 <= value <= near[1] / 1000 * 1.001 + 0.001
    assert found["max"] == in_order[-1] / 1000


def test_a_delivery_before_its_instant_is_counted_and_not_hidden() -> None:
    late = Lateness([-5_000_000, 1_000_000])
    assert (late.count, late.early, late.earliest_us) == (2, 1, -5000)
    assert late.percentiles()["max"] == 1.0


def test_without_a_delivery_nothing_is_said() -> None:
    late = Lateness([])
    assert set(late.percentiles().values()) == {None}
    assert late.curve() == []


def test_the_curve_climbs_to_the_maximum_at_100_percent() -> None:
    curve = Lateness(range(0, 1_000_000_000, 1_000_000)).curve()
    assert curve == sorted(curve)
    assert curve[0][0] == 0
    assert curve[-1] == (100.0, 999.0)
    assert len([point for point in curve if point[0] > 99]) > 10


def test_a_target_that_is_not_there_is_said_to_be_away() -> None:
    with pytest.raises(CarillonError, match="on port 1 does not answer"):
        fetch_counts(1)
