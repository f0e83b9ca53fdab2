"""How tests run a scenario: on a database of their own, one repetition, judged as the command judges it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from app.load.place import Place, Wanted, open_servers, prepare
from app.load.run import conclude
from app.load.summary import Figures

QUICK = {"SCHEDULER_PLANNER_LOOKAHEAD": "2s"}
"""The planner looks as far ahead as it takes to plan a small crowd."""


async def measured(
    dsn: str, measure: Callable[[Place], Awaitable[Figures]], *, target_url: str | None = None
) -> dict[str, Any]:
    """The summary of one repetition."""
    wanted = Wanted(database_url=dsn, target_url=target_url, settings=QUICK)
    with open_servers(wanted, lambda _: None) as place:
        await prepare(place)
        return conclude([await measure(place)], [], {})


def require_exactly_once(content: dict[str, Any], runs: int) -> None:
    """Everything delivered and recorded, nothing else."""
    assert content["verdict"]["ok"] is True, content["verdict"]
    assert [content[key] for key in ("expected", "delivered", "recorded")] == [runs] * 3
    assert [content[key] for key in ("duplicates", "missing")] == [0, 0]
