"""Every promise names tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.deploy.repository import DOCS, ROOT, links, sections

PAGE = DOCS / "guarantees.md"
PAGES = [PAGE, *sorted((DOCS / "decisions").glob("*.md"))]
PROMISES = ("1-planning", "2-delivery", "3-identity", "4-lateness", "5-isolation")


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    for text, path, _ in links(page):
        if path.is_relative_to(ROOT / "tests"):
            assert text in names_in(path), f"{path.name} has no {text}"


def test_every_test_that_is_named_is_a_link() -> None:
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", PAGE.read_text()))
    assert named == {text for text, path, _ in links(PAGE) if path.is_relative_to(ROOT / "tests")}


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_is_held_by_tests(promise: str) -> None:
    assert len(re.findall(r"\]\(\.\./tests/", sections(PAGE)[promise])) >= 3
