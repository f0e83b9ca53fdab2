"""What a kept data folder remembers, and that only its owner may read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.local.kept import FILE, Kept, recall, remember

KEPT = Kept("tenant", "key", "admin", 40_001)


def test_what_was_remembered_is_recalled_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    assert recall(tmp_path) is None
    for kept in (KEPT, Kept("other", "key", "admin", 40_002)):
        remember(tmp_path, kept)
        assert recall(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_without_a_folder_nothing_is_remembered() -> None:
    remember(None, KEPT)
    assert recall(None) is None


def test_the_file_of_an_older_version_lacks_only_what_that_did_not_know(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"tenant_id": "tenant", "key": "key"}))
    assert recall(tmp_path) == Kept("tenant", "key", None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '{"tenant_id": "tenant"}'])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match="is damaged; remove it"):
        recall(tmp_path)
