"""Commands of the `carillon` program. Each module exports one typer app and imports lazily."""
