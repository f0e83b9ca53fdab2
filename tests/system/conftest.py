"""Fleets of real replicas, each on a database of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.store.migrations import apply_all
from tests.servers import DatabaseServer, memory, run
from tests.system.replicas import Fleet, Replica


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    """Replicas that the test starts; at its end all are stopped, and an unexpected error in a log fails it."""
    with _stopped_at_the_end(Fleet(dsn, tmp_path)) as started:
        yield started


@pytest.fixture(scope="module")
def standing(server: DatabaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica that the tests of one file share, each with a tenant of its own."""
    dsn = server.create_migrated(apply_all)
    try:
        with _stopped_at_the_end(Fleet(dsn, tmp_path_factory.mktemp("standing"))) as fleet:
            [replica] = run(fleet.start("standing"))
            yield replica
    finally:
        server.drop(dsn)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A temporary folder that any user may enter, as PostgreSQL's account must; pytest's own are private."""
    folder = Path(tempfile.mkdtemp(prefix="carillon-tests-", dir=memory()))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def _stopped_at_the_end(fleet: Fleet) -> Iterator[Fleet]:
    try:
        yield fleet
        fleet.stop()
    finally:
        fleet.kill()
