"""A fleet of real replicas on the test's own database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.replicas import Fleet


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    """Replicas that the test starts; at its end all are stopped, and an unexpected error in a log fails it."""
    started = Fleet(dsn, tmp_path)
    try:
        yield started
        started.stop()
    finally:
        started.kill()
