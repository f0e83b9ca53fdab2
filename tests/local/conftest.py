"""Fixtures of the tests of app/local."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.local.postgres import EmbeddedPostgres
from tests.servers import memory

FAST = {"fsync": "off"}


@pytest.fixture(scope="package")
def small_server() -> Iterator[EmbeddedPostgres]:
    """A server for tests that change nothing but databases of their own."""
    with EmbeddedPostgres.start(settings=FAST, temporary_in=memory()) as server:
        yield server


@pytest.fixture(scope="package")
def prepared_data() -> Iterator[Path]:
    """A data folder of a server that was stopped cleanly: to be copied, which is cheaper than making one."""
    folder = Path(tempfile.mkdtemp(prefix="carillon-tests-", dir=memory()))
    EmbeddedPostgres.start(folder, settings=FAST).stop()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data_dir(open_folder: Path, prepared_data: Path) -> Path:
    """A data folder of this test's own, with the data of a server that was stopped cleanly."""
    copy = open_folder / "data"
    shutil.copytree(prepared_data, copy)
    copy.chmod(0o755)
    for original in [prepared_data / "postgres", *(prepared_data / "postgres").rglob("*")]:
        stat = original.stat()
        os.chown(copy / original.relative_to(prepared_data), stat.st_uid, stat.st_gid)
    return copy


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A temporary folder any user may enter; pytest's own are private."""
    folder = Path(tempfile.mkdtemp(prefix="carillon-tests-", dir=memory()))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
