"""The command line. Every command imports what it needs by itself, so that the small ones start at once.

Exit status: 0 done, 1 failed, 2 the command line or the configuration is wrong, 3 the database has another schema.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from app.cli import cron, load
from app.errors import CarillonError, ConfigError, SchemaMismatch, StoreUnavailable

logger = logging.getLogger("app")

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_SCHEMA = 3


class _Commands(TyperGroup):
    """Turns our own errors into a line for people and an exit status; anything else is a bug and keeps its trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CarillonError as error:
            typer.echo(f"carillon: {error}", err=True)
            raise typer.Exit(_status(error)) from None


def _status(error: CarillonError) -> int:
    match error:
        case ConfigError():
            return EXIT_CONFIG
        case SchemaMismatch():
            return EXIT_SCHEMA
        case _:
            return EXIT_FAILED


cli = typer.Typer(
    cls=_Commands,
    help="A multi-tenant HTTP scheduler on PostgreSQL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they print local variables, and those hold secrets
)
cli.add_typer(cron.app, name="cron")
cli.add_typer(load.app, name="load")


def main() -> None:
    cli(prog_name="carillon")


class MigrateAction(StrEnum):
    STATUS = "status"


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"carillon {version('carillon')}")
        raise typer.Exit


@cli.callback()
def carillon(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A multi-tenant HTTP scheduler on PostgreSQL."""


@cli.command()
def serve(
    roles: Annotated[
        str | None,
        typer.Option(help="Comma-separated: api, planner, executor, maintenance.  [SCHEDULER_ROLES, or all]"),
    ] = None,
) -> None:
    """Run one replica, configured by SCHEDULER_*, until SIGTERM or SIGINT drains it."""
    from app.settings import load_settings

    if roles is not None:
        _check_roles(roles)
    settings = load_settings(overrides={} if roles is None else {"SCHEDULER_ROLES": roles})

    from app import logs, main

    logs.configure(settings.log)
    try:
        status = _run(main.serve(settings))
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{settings.database.shown}: {error}") from error
    except CarillonError:
        raise
    except Exception:
        logger.exception(
            "replica.broken"
        )  # into the log, where its readers look, and masked as everything there
        status = EXIT_FAILED
    raise typer.Exit(status)


def _check_roles(given: str) -> None:
    """Unlike a variable's, the words of a command line may be repeated: they were on the screen already."""
    from app.settings import Role

    for word in given.split(","):
        if word.strip() not in set(Role):
            raise ConfigError(f"--roles: {word.strip()!r} is not a role. Allowed: {', '.join(Role)}")


@cli.command()
def migrate(
    action: Annotated[
        MigrateAction | None, typer.Argument(help="`status` only tells where the schema stands.")
    ] = None,
) -> None:
    """Bring the database's schema up to date."""
    from app.cli import migrate
    from app.settings import load_settings

    database = load_settings().database
    match action:
        case None:
            _run(migrate.apply(database))
        case MigrateAction.STATUS:
            _run(migrate.show(database))


@cli.command()
def doctor() -> None:
    """Look for what keeps this installation from working; exit 1, 2 or 3 when something does."""
    from app.cli import doctor

    async def examine() -> list[str]:
        wrong: list[str] = []
        async for finding in doctor.examine():
            typer.echo(str(finding))
            wrong += [] if finding.is_good else [finding.subject]
        return wrong

    wrong = _run(examine())
    if wrong:
        own = {"configuration": EXIT_CONFIG, "schema": EXIT_SCHEMA}
        raise typer.Exit(own.get(wrong[0], EXIT_FAILED))


@cli.command()
def check_config(
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference of all settings (Markdown) instead.")
    ] = False,
) -> None:
    """Check the configuration without starting, and show what is in force."""
    from app.cli import check_config

    if reference:
        check_config.print_reference()
    else:
        check_config.check()


@cli.command()
def dev(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the first replica's API.")] = 8080,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the data here; else it goes when you stop.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=16, help="How many replicas to run.")] = 1,
    claim_mode: Annotated[
        str,
        typer.Option(
            metavar="MODE", help="What hands out work: postgres, or kafka with a broker of its own."
        ),
    ] = "postgres",
) -> None:
    """Run everything on this machine: PostgreSQL, replicas, a demo tenant and samples. Ctrl-C ends all of it."""
    from app import dev
    from app.settings import ClaimMode

    if claim_mode not in set(ClaimMode):
        raise ConfigError(f"--claim-mode: there is no such mode. Allowed: {', '.join(ClaimMode)}")
    raise typer.Exit(
        dev.run(
            dev.Options(port=port, replicas=replicas, data_dir=data_dir, claim_mode=ClaimMode(claim_mode))
        )
    )


def _run(work: Coroutine[Any, Any, T]) -> T:
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:  # faster; there is none for some platforms
        import uvloop

        new_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    main()
