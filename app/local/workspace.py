"""Temporary folders that vanish with their users, also after SIGKILL.

A workspace is locked (flock) for as long as any process that inherited its descriptor lives. Whoever opens the next
one removes those whose lock is free: their owner was killed before it could clean up.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

PREFIX = "carillon-local-"


@dataclass(frozen=True, slots=True)
class Workspace:
    """`path` is ours while `lock` (a descriptor of the folder, to be passed to children) is open."""

    path: Path
    lock: int


def open_workspace(parent: Path | None = None) -> Workspace:
    """A new folder below `parent` (by default the system's temporary folder) that others may enter but not write."""
    sweep(parent)
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # swept by another process before we had it
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_still(path, lock):
            path.chmod(0o755)  # the server may run as another user than we
            return Workspace(path=path, lock=lock)
        os.close(lock)  # swept between open and flock


def close_workspace(workspace: Workspace) -> None:
    """Remove the folder with all that is in it, then let go of it."""
    shutil.rmtree(workspace.path, ignore_errors=True)
    os.close(workspace.lock)


def sweep(parent: Path | None = None) -> None:
    """Remove the workspaces of this user below `parent` that nobody holds any more."""
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        lock = _try_lock(path)
        if lock is None:
            continue
        try:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def lock_folder(path: Path) -> int | None:
    """A descriptor that locks the folder while it, or a child's copy of it, is open; None when another has it."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _try_lock(path: Path) -> int | None:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or another user's: not ours to remove
        return None
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _is_still(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False
