"""What a load run refuses to do: hammer a stranger's server, and measure durability in memory."""

from __future__ import annotations

import re
import tempfile
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from app.errors import ConfigError

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


def require_owned(url: str, *, is_owned: bool) -> None:
    """Raises ConfigError for a target that is not on loopback, unless the person says that it is theirs.

    A load run sends as much as it can: to a stranger's server it would be an attack.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--target: {url!r} is not a URL such as http://127.0.0.1:8000")
    if not is_owned and not is_loopback(parts.hostname):
        raise ConfigError(
            f"--target: {parts.hostname} is not on this machine's loopback, and a load run sends as much as it can; "
            "if it is yours, say so with --i-own-this-target"
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone. A name that is no address does not, except `localhost`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def require_disk(folder: Path | None) -> None:
    """Raises ConfigError for a folder in memory: there, durability costs nothing and every figure is a lie."""
    path = (folder or Path(tempfile.gettempdir())).resolve()
    kind = file_system_of(path, Path("/proc/self/mounts").read_text())
    if kind in MEMORY_FILE_SYSTEMS:
        raise ConfigError(
            f"--work-dir: {path} is in memory ({kind}); the database of a load run belongs on a disk"
        )


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system that `path` is on, by the text of /proc/self/mounts: the deepest mount counts."""
    deepest = (-1, "unknown")
    for line in mounts.splitlines():
        _, at, kind, *_ = line.split(" ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), at))
        if path.is_relative_to(point) and len(point.parts) >= deepest[0]:
            deepest = (len(point.parts), kind)  # of two on one point, the later one covers
    return deepest[1]
