"""The files that operators use, read as what they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def sections(page: Path) -> dict[str, str]:
    """The sections of a Markdown page by their anchor, as GitHub makes it: the heading in lower case, with dashes."""
    found: dict[str, str] = {}
    for part in re.split(r"^(?=#+ )", page.read_text(), flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        if heading.startswith("#"):
            found[re.sub(r"[^\w -]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")] = text
    return found


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """(text, file, anchor) of every link to a file of this repository."""
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            yield text, (page.parent / name).resolve() if name else page, anchor
