"""The locks of the image say the same as requirements.lock, and all that is needed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.repository import DEPLOY, ROOT

LOCK = ROOT / "requirements.lock"


def entries(path: Path) -> dict[str, str]:
    """Each package's whole entry, hashes and marker included, without comments."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {block.partition("==")[0]: block.rstrip() for block in blocks if block}


def needed(requirements: Iterable[str]) -> set[str]:
    """The packages that these requirements ask for on the machine that runs this, and all that those need."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        found.add(canonicalize_name(wanted.name))
        for wished in ("", *wanted.extras):
            if (wanted.name, wished) not in seen:
                seen.add((wanted.name, wished))
                waiting += [(each, wished) for each in distribution(wanted.name).requires or []]
    return found


def here(path: Path) -> set[str]:
    """The packages of a lock that a machine like this one gets."""
    pinned = [Requirement(entry.partition("\\")[0]) for entry in entries(path).values()]
    return {each.name for each in pinned if each.marker is None or each.marker.evaluate()}


@pytest.mark.parametrize("name", ["runtime.lock", "build.lock"])
def test_a_lock_of_the_image_is_a_part_of_the_one_lock(name: str) -> None:
    whole = entries(LOCK)
    part = entries(DEPLOY / name)
    assert part
    assert {package: whole.get(package) for package in part} == part
    assert all("--hash=sha256:" in entry for entry in part.values())


def test_the_runtime_lock_has_all_that_carillon_needs_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert here(DEPLOY / "runtime.lock") == needed(project["dependencies"])


def test_the_build_lock_has_all_that_hatchling_needs_and_nothing_else() -> None:
    assert here(DEPLOY / "build.lock") == needed(["hatchling"])
