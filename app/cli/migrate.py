"""`carillon migrate`: bring the database's schema up to date, or say where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from app.errors import StoreUnavailable
from app.settings import DatabaseSettings
from app.store import migrations


async def apply(database: DatabaseSettings) -> None:
    """Apply what is missing. Raises SchemaMismatch when the history does not fit, StoreUnavailable."""
    with _named(database):
        applied = await migrations.apply_all(database.dsn)
    if applied:
        count = "one migration" if len(applied) == 1 else f"{len(applied)} migrations"
        typer.echo(f"{database.shown}: applied {count}, up to {applied[-1]:04}")
    else:
        typer.echo(f"{database.shown}: up to date")


async def show(database: DatabaseSettings) -> None:
    """Print every migration with its state, and raise SchemaMismatch when the schema is not this version's."""
    with _named(database):
        listed = await migrations.status(database.dsn)
    for found in listed:
        at = f" {found.applied_at:%Y-%m-%d %H:%M:%SZ}" if found.applied_at else ""
        typer.echo(f"{found.state:8} {found.name}{at}")
    with _named(database):
        await migrations.require_current(database.dsn)


@contextmanager
def _named(database: DatabaseSettings) -> Iterator[None]:
    """Say which database it is that does not answer."""
    try:
        yield
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{database.shown}: {error}") from error
