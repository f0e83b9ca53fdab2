"""What a kept data folder remembers beside the database: what a person's shell and own schedules hold on to."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from app.errors import ConfigError

FILE = "carillon-dev.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """The demo tenant with its key (the database knows only the key's digest), the administrator's key and the
    port of the receiver. What a file of an older version does not have is None."""

    tenant_id: str
    key: str
    admin_key: str | None = None
    echo_port: int | None = None


def recall(folder: Path | None) -> Kept | None:
    """What an earlier run has left in `folder`. Raises ConfigError for a file that is not ours."""
    if folder is None or not (file := folder / FILE).exists():
        return None
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return Kept(known["tenant_id"], known["key"], known.get("admin_key"), known.get("echo_port"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} is damaged; remove it, and a new demo tenant is made") from None


def remember(folder: Path | None, kept: Kept) -> None:
    """Write the file for its owner alone, whole or not at all; nothing without a folder."""
    if folder is None:
        return
    new = folder / f"{FILE}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(kept), file)
    new.replace(folder / FILE)
