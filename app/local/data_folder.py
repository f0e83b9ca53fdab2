"""The folder a local server keeps its data in: `<data_dir>/postgres`, and `<data_dir>/postgres.log` beside it.

New data is made in `postgres.new` and renamed when complete, so an interrupted start leaves nothing half made.
"""

from __future__ import annotations

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

NOTICE_LIMIT = timedelta(seconds=2)
"""How long a server may take to notice that its parent was killed, and to say that it stops."""

POLL = 0.02


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
    try:
        if not path.exists():
            path.mkdir(parents=True)
            path.chmod(0o755)
        lock = _lock_soon(path)
    except OSError as error:
        raise ConfigError(f"the data folder {path} cannot be used: {error.strerror}") from error
    try:
        folder = DataFolder(path=path, user=choose_user(path / "postgres"), lock=lock)
        _refuse_foreign_content(folder)
        _refuse_foreign_servers(folder)
    except BaseException:
        os.close(lock)
        raise
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
    _refuse_unreachable(folder)
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
        running = read_postmaster(path / "postgres")
        ending = running is None or running.status == "stopping"
        limit = ENDING_LIMIT if ending else NOTICE_LIMIT
        if time.monotonic() - begun > limit.total_seconds():
            by = f" (process {running.pid})" if running else ""
            raise ConfigError(
                f"the data folder {path} is in use by another PostgreSQL server{by}; stop that one first"
            )
        time.sleep(POLL)


def _refuse_foreign_content(folder: DataFolder) -> None:
    strangers = sorted(child.name for child in folder.path.iterdir() if not child.name.startswith("postgres"))
    if folder.pgdata.exists() and not (folder.pgdata / "PG_VERSION").exists():
        raise ConfigError(f"the folder {folder.pgdata} holds something else than PostgreSQL data")
    if strangers and "PG_VERSION" in strangers:
        raise ConfigError(f"{folder.path} is a PostgreSQL data folder itself; name the folder to keep one in")


def _refuse_foreign_servers(folder: DataFolder) -> None:
    """A server that somebody else started on this data, or an orphan of one: found by its working directory."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            inside = (entry / "cwd").readlink() == folder.pgdata
            program = (entry / "comm").read_text().strip()
        except OSError:  # ended meanwhile, or another user's
            continue
        if inside and program.startswith("postgres"):
            raise ConfigError(
                f"the data folder {folder.path} is in use by another PostgreSQL server (process {entry.name});"
                " stop that one first"
            )


def _refuse_unreachable(folder: DataFolder) -> None:
    if folder.user is None:
        return
    if run_program(["test", "-x", folder.path], user=folder.user).returncode != 0:
        raise ConfigError(
            f"the data folder {folder.path} cannot be reached by {folder.user.name}, the account PostgreSQL runs under"
            " when started by root; choose one outside of private folders such as /root"
        )


def _refuse_other_major(folder: DataFolder, *, version: str) -> None:
    theirs = (folder.pgdata / "PG_VERSION").read_text().strip()
    ours = version.partition(".")[0]
    if theirs != ours:
        raise ConfigError(
            f"the data in {folder.path} is of PostgreSQL {theirs}, this is PostgreSQL {ours}: choose another data"
            " folder, or move the data with pg_dump or pg_upgrade"
        )
