"""What a load run says while it works: steps, and bars where somebody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Advance = Callable[[int], None]
"""Told how much is done so far."""


class Show:
    """Writes to standard error, so that standard output is for the result. Bars appear on a terminal only."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    def step(self, text: str) -> None:
        """One line about what begins now."""
        self._console.print(f"[dim]·[/dim] {escape(text)}")

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Advance]:
        """A bar of `total` items for the length of the block."""
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        ) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done: progress.update(task, completed=done)

    def result(self, content: Mapping[str, Any], out: Path) -> None:
        """The figures, where the files are, and the verdict."""
        self._console.print(_side_by_side(content) if "runs" in content else _one_below_the_other(content))
        self._console.print(f"[dim]·[/dim] {escape(str(out))}: summary.json, report.html")
        verdict = content["verdict"]
        for note in verdict["notes"]:
            self._console.print(f"[bold]NOTE[/bold] {escape(note)}")
        if verdict["ok"]:
            self._console.print("[bold green]GOOD[/bold green] nothing wrong was seen, all bounds were kept")
        for problem in verdict["problems"]:
            self._console.print(f"[bold red]BAD[/bold red]  {escape(problem)}")


def _one_below_the_other(content: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, figure in told(content):
        table.add_row(name, figure)
    return table


def _side_by_side(content: Mapping[str, Any]) -> Table:
    """A comparison: a column for each run."""
    columns = {name: dict(told(one)) for name, one in content["runs"].items()}
    table = Table("", *map(escape, columns), box=None, padding=(0, 2, 0, 0))
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    for row in rows:
        table.add_row(row, *(column.get(row, "") for column in columns.values()))
    return table


UNTOLD = frozenset({"verdict", "env", "series", "statements", "lateness_curve", "repeats"})


def told(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The figures that were measured, one a line; those with parts in one line each."""
    for name, value in content.items():
        if value is None or name in UNTOLD:
            continue
        if isinstance(value, Mapping):
            plain = {part: figure for part, figure in value.items() if not isinstance(figure, Mapping)}
            parts = [f"{part} {_shown(figure)}" for part, figure in plain.items() if figure is not None]
            if parts:
                yield name, "  ".join(parts)
            nested = {f"{name} {part}": value[part] for part in value.keys() - plain.keys()}
            yield from told(dict(sorted(nested.items())))
        else:
            yield name, _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def silent() -> Show:
    """For tests: says nothing."""
    return Show(Console(quiet=True))
