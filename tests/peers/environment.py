"""The peer's own virtual environment: made once, of a lock with hashes, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

LOCK = Path(__file__).with_name("requirements.lock")


def cache_folder() -> Path:
    """Where environments are kept: `carillon/peers` below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "carillon" / "peers"


def peer_python(folder: Path | None = None) -> Path:
    """The interpreter of the environment for this lock and this Python; the environment is made when it is not there.

    Raises subprocess.CalledProcessError when pip cannot install it.
    """
    key = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    home = (folder or cache_folder()) / key
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True, symlinks=True)
        install: list[str | Path] = [
            *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--require-hashes", "-r", LOCK),
        ]
        subprocess.run([os.fspath(part) for part in install], check=True)
        (home / "complete").touch()
    return python
