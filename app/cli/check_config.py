"""`carillon check-config`: read the configuration as `serve` would, and show what is in force."""

from __future__ import annotations

import typer

from app.settings import describe, in_force, load_settings


def check() -> None:
    """Print every setting with its value, secrets only as "(set, not shown)". Raises ConfigError."""
    for variable, value in in_force(load_settings()):
        typer.echo(f"{variable}={value}")


def print_reference() -> None:
    """Print docs/configuration.md."""
    typer.echo(describe(), nl=False)
