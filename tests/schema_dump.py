"""The schema as PostgreSQL itself tells it, for migrations/schema.sql.

It is there to be read in reviews and compared by a test, never to be run. After a new migration:

    WRITE_SCHEMA=1 .venv/bin/pytest tests/store/test_migrations.py -k dump
"""

from __future__ import annotations

import os
import subprocess

from app.local.binaries import FIXED_ENVIRONMENT, embedded_binaries
from app.store.migrations import folder

HEAD = """\
-- The schema after all migrations, as pg_dump tells it (without the monthly partitions).
-- Generated and compared by tests/store/test_migrations.py; to be read, never to be run.
"""

MONTHS = ("job_run_[0-9]*", "run_attempt_[0-9]*")


def dump_schema(dsn: str) -> str:
    """What pg_dump of the embedded server tells about the database, without what changes from run to run."""
    binaries = embedded_binaries()
    assert binaries is not None, "the dump needs pg_dump of the extra `embedded`"
    arguments = [str(binaries / "pg_dump"), "--schema-only", "--no-owner", "--no-privileges"]
    arguments += [f"--exclude-table={pattern}" for pattern in MONTHS]
    told = subprocess.run(
        [*arguments, dsn], env=FIXED_ENVIRONMENT, check=True, capture_output=True, text=True
    )
    kept: list[str] = []
    for line in told.stdout.splitlines():
        if line.startswith(("--", "SET ", "SELECT pg_catalog.set_config", "\\restrict", "\\unrestrict")):
            continue
        if line or (kept and kept[-1]):
            kept.append(line)
    return HEAD + "\n" + "\n".join(kept).strip() + "\n"


def write_if_asked(dump: str) -> None:
    """Replace the file in the repository when WRITE_SCHEMA=1."""
    if os.environ.get("WRITE_SCHEMA") == "1":
        (folder() / "schema.sql").write_text(dump)
