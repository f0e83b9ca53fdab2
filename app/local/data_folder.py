"""The folder a local server keeps its data in: `<data_dir>/postgres`, and `<data_dir>/postgres.log` beside it.

New data is made in `postgres.new` and renamed when complete, so an interrupted start leaves nothing half made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from app.errors import ConfigError
from app.local.binaries import ServerUser, choose_user, run_program
from app.local.workspace import lock_folder

ENDING_LIMIT = timedelta(seconds=30)
"""How long to wait for the server of a killed process that is just writing its last checkpoint."""

NOTICE_LIMIT = timedelta(seconds=5)
"""How long a server may take to notice that its parent was killed, and to say that it stops."""

POLL = 0.05


@dataclass(frozen=True, slots=True)
class DataFolder:
    """A data folder we hold: `lock` is a descriptor to be passed to the server, so that it holds the folder too."""

    path: Path
    user: ServerUser | None
    lock: int

    @property
    def pgdata(self) -> Path:
        return self.path / "postgres"

    @property
    def log_path(self) -> Path:
        return self.path / "postgres.log"


@dataclass(frozen=True, slots=True)
class Postmaster:
    """What `postmaster.pid` says: the process, and one of `starting`, `stopping`, `ready`, `standby` or nothing yet.

    Source: src/include/utils/pidfile.h, lines 1 and 8.
    """

    pid: int
    status: str


def open_data_folder(path: Path) -> DataFolder:
    """Make or take over a data folder, alone; it may be empty.

    A server that is just ending because its parent was killed is waited for.
    Raises `ConfigError` when another server uses the folder or it cannot be used by PostgreSQL's account.
    """
    with contextlib.ExitStack() as undo:
        try:
            if not path.exists():
                path.mkdir(parents=True)
                path.chmod(0o755)  # the server may run as another user than we; the data itself is 0700
            lock = _lock_soon(path)
            undo.callback(os.close, lock)
            _refuse_foreign_content(path)
        except OSError as error:
            raise ConfigError(f"the data folder {path} cannot be used: {error.strerror}") from error
        folder = DataFolder(path=path, user=choose_user(path / "postgres"), lock=lock)
        holder = _find_server(folder.pgdata)
        if holder is not None:  # somebody else started it, so it does not hold the lock
            raise _in_use(path, holder)
        undo.pop_all()
        return folder


def close_data_folder(folder: DataFolder) -> None:
    """Let go of the folder."""
    os.close(folder.lock)


def initialise(
    folder: DataFolder, *, binaries: Path, version: str, initdb_options: Sequence[str] = ()
) -> None:
    """Fill an empty folder with a new cluster; check that one from an earlier run is of the same major version.

    Raises `ConfigError` when it is not, or when initdb fails.
    """
    _open_to_server(folder)
    if folder.pgdata.exists():
        _refuse_other_major(folder, version=version)
        # We hold the folder and nobody works in it, so this file is a dead server's; by now its process id may be
        # anybody's, and PostgreSQL would refuse to start because of that.
        (folder.pgdata / "postmaster.pid").unlink(missing_ok=True)
        return
    new = folder.path / "postgres.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    if folder.user is not None:
        os.chown(new, folder.user.uid, folder.user.gid)
    command = [os.fspath(binaries / "initdb"), "-D", os.fspath(new)]
    command += ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", *initdb_options]
    done = run_program(command, user=folder.user)
    if done.returncode != 0:
        raise ConfigError(f"initdb failed in {folder.path}:\n{done.stdout.decode(errors='replace').strip()}")
    new.rename(folder.pgdata)


def read_postmaster(pgdata: Path) -> Postmaster | None:
    """What the server's own file says; None when there is no server or the file is still being written."""
    try:
        lines = (pgdata / "postmaster.pid").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    if not lines or not lines[0].strip().isdecimal():
        return None
    return Postmaster(pid=int(lines[0]), status=lines[7].strip() if len(lines) > 7 else "")


def _lock_soon(path: Path) -> int:
    """Lock the folder, waiting for a server that is on its way out."""
    begun = time.monotonic()
    while True:
        lock = lock_folder(path)
        if lock is not None:
            return lock
        holder = _find_server(path / "postgres")
        running = read_postmaster(path / "postgres")
        is_ending = running is None or running.pid != holder or running.status == "stopping"
        limit = ENDING_LIMIT if is_ending else NOTICE_LIMIT
        if time.monotonic() - begun > limit.total_seconds():
            raise _in_use(path, holder)
        time.sleep(POLL)


def _in_use(path: Path, holder: int | None) -> ConfigError:
    by = f" (process {holder})" if holder else ""
    return ConfigError(
        f"the data folder {path} is in use by another PostgreSQL server{by}; stop that one first"
    )


def _refuse_foreign_content(path: Path) -> None:
    if (path / "PG_VERSION").exists():
        raise ConfigError(f"{path} is a PostgreSQL data folder itself; name the folder to keep one in")
    if (path / "postgres").exists() and not (path / "postgres" / "PG_VERSION").exists():
        raise ConfigError(f"the folder {path / 'postgres'} holds something else than PostgreSQL data")


def _find_server(pgdata: Path) -> int | None:
    """The process id of a live postmaster, or of an orphan of one, on this data: every one of them works inside it."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            inside = (entry / "cwd").readlink() == pgdata
            program = (entry / "comm").read_text().strip()
        except OSError:  # ended meanwhile, or another user's
            continue
        if inside and program.startswith("postgres"):
            found.append(int(entry.name))
    running = read_postmaster(pgdata)
    if running is not None and running.pid in found:
        return running.pid
    return min(found, default=None)


def _open_to_server(folder: DataFolder) -> None:
    """Let PostgreSQL's account through the data folder itself, if it is used for nothing else (`mktemp -d` is 0700).

    Folders above it are not touched: raises `ConfigError` when one of them keeps that account out.
    """
    if folder.user is None or _can_enter(folder.path, folder.user):
        return
    if folder.pgdata.exists() or not any(folder.path.iterdir()):
        folder.path.chmod(folder.path.stat().st_mode | 0o011)
        if _can_enter(folder.path, folder.user):
            return
    raise ConfigError(
        f"the data folder {folder.path} cannot be reached by {folder.user.name}, the account PostgreSQL runs under"
        " when started by root; choose one outside of private folders such as /root"
    )


def _can_enter(path: Path, user: ServerUser) -> bool:
    return run_program(["test", "-x", path], user=user).returncode == 0


def _refuse_other_major(folder: DataFolder, *, version: str) -> None:
    theirs = (folder.pgdata / "PG_VERSION").read_text().strip()
    ours = version.partition(".")[0]
    if theirs != ours:
        raise ConfigError(
            f"the data in {folder.path} is of PostgreSQL {theirs}, this is PostgreSQL {ours}: choose another data"
            " folder, or move the data with pg_dump or pg_upgrade"
        )
