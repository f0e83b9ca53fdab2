"""Temporary folders: removed by their owner, or by the next one when the owner was killed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from app.local.workspace import PREFIX, close_workspace, lock_folder, open_workspace, sweep
from tests.local.launching import python, read_line

OPEN_AND_WAIT = """
import sys
from app.local.workspace import open_workspace
print(open_workspace().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_closed_workspace_is_gone_with_all_that_is_in_it() -> None:
    workspace = open_workspace()
    (workspace.path / "folder").mkdir()
    (workspace.path / "folder" / "file").write_text("x")
    close_workspace(workspace)
    assert not workspace.path.exists()


def test_a_workspace_in_use_is_left_alone() -> None:
    one, other = open_workspace(), open_workspace()
    sweep()
    assert one.path.exists()
    assert other.path.exists()
    close_workspace(one)
    close_workspace(other)


def test_a_workspace_of_another_live_process_is_left_alone_and_removed_after_its_death() -> None:
    with python(OPEN_AND_WAIT) as process:
        path = Path(read_line(process))
        sweep()
        assert path.exists()
    sweep()
    assert not path.exists()


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_new_folder_swept_before_it_was_locked_is_made_anew(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name = {"open": (os, "open"), "flock": (fcntl, "flock")}[moment]
    call = getattr(place, name)
    swept: list[Path] = []

    def sweep_first(*arguments: Any) -> Any:
        if not swept:
            swept.extend(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
            swept[0].rmdir()
        return call(*arguments)

    monkeypatch.setattr(place, name, sweep_first)
    workspace = open_workspace()
    assert workspace.path.is_dir()
    assert not swept[0].exists()
    close_workspace(workspace)


def test_only_folders_of_ours_are_swept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "diary.txt").write_text("dear")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{PREFIX}file").write_text("a file")
    (tmp_path / "other").mkdir()
    sweep()
    assert (tmp_path / "elsewhere" / "diary.txt").exists()
    assert (tmp_path / f"{PREFIX}file").exists()
    assert (tmp_path / "other").exists()


def test_a_lock_passed_to_a_child_outlives_ours(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None
    kept = os.dup(lock)
    os.close(lock)
    assert lock_folder(tmp_path) is None
    os.close(kept)
    free = lock_folder(tmp_path)
    assert free is not None
    os.close(free)
