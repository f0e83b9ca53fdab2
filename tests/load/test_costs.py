"""Costs per run, out of two readings."""

from __future__ import annotations

import pytest

from app.load.costs import Costs
from app.load.cpu import CpuUse
from app.store import load_measure
from app.store.load_measure import StatementUse
from app.store.pool import Connection

PARTS = {"executor": 1.0, "planner": 0.5, "postgres": 2.0, "receiver": 0.25}
STATEMENTS = (StatementUse("SELECT\n  1", 10, 5.0), StatementUse("COMMIT", 30, 15.0))


def costs(**changes: object) -> Costs:
    fields: dict[str, object] = {
        "seconds": 10.0,
        "cpu": CpuUse(PARTS, machine=8.75, stolen=0.5),
        "wal_bytes": 1,
        "statements": STATEMENTS,
        "transactions": 1,
    }
    return Costs(**{**fields, **changes})  # type: ignore[arg-type]


def test_cpu_is_told_by_part_and_in_total() -> None:
    used = costs().cpu_us_per_run(1000)

    assert used == {
        "total": 3750.0,
        "executor": 1000.0,
        "planner": 500.0,
        "postgres": 2000.0,
        "receiver": 250.0,
        "broker": None,
    }


def test_without_the_databases_part_there_is_no_total() -> None:
    parts = {name: seconds for name, seconds in PARTS.items() if name != "postgres"}

    assert costs(cpu=CpuUse(parts, machine=9.0, stolen=0.0)).cpu_us_per_run(10)["total"] is None


def test_what_others_took_is_the_rest_of_the_machine() -> None:
    assert costs().others_share == pytest.approx(0.5)
    assert costs().stolen_share == pytest.approx(0.05)


def test_statements_are_counted_and_the_busiest_told_first() -> None:
    used = costs()

    assert used.statements_per_run(20) == 2.0
    busiest = used.busiest_statements(20)
    assert busiest is not None
    assert [one["query"] for one in busiest] == ["COMMIT", "SELECT 1"]
    assert busiest[0] == {"query": "COMMIT", "calls_per_run": 1.5, "us_per_run": 750.0, "ms_per_call": 0.5}


def test_a_server_that_does_not_count_has_no_figure() -> None:
    assert costs(statements=None).statements_per_run(20) is None
    assert costs(statements=None).busiest_statements(20) is None


async def test_a_server_without_the_extension_says_so(db: Connection) -> None:
    assert await load_measure.statement_use(db) is None
