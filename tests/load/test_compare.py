"""Several summaries side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import ConfigError
from app.load import summary
from app.load.compare import compared, read_all
from app.load.progress import silent
from app.load.run import EXIT_BAD, EXIT_GOOD, conclude, conclude_all
from app.load.summary import Figures


def burst(recorded_per_s: float, *, missing: int = 0) -> dict[str, Any]:
    figures = Figures(
        scenario="burst",
        expected=10,
        delivered=10 - missing,
        recorded=10,
        duplicates=0,
        missing=missing,
        recorded_per_s=recorded_per_s,
    )
    return conclude([figures], [], {})


def test_every_run_is_told_against_the_first() -> None:
    content = compared({"postgres": burst(100.0), "kafka": burst(85.0)})

    assert content["ratios"]["kafka"]["recorded_per_s"] == 0.85
    assert content["ratios"]["kafka"]["planned_per_s"] is None
    assert list(content["runs"]) == ["postgres", "kafka"]
    assert content["verdict"]["ok"] is True


def test_one_bad_run_makes_the_comparison_bad_and_is_named() -> None:
    content = compared({"a": burst(1.0), "b": burst(1.0, missing=1)})

    assert content["verdict"]["ok"] is False
    assert content["verdict"]["problems"][0].startswith("b: ")


def test_runs_of_both_modes_are_written_each_and_together(tmp_path: Path) -> None:
    code = conclude_all({"postgres": burst(2.0), "kafka": burst(1.0)}, tmp_path, silent())

    assert code == EXIT_GOOD
    assert summary.read(tmp_path)["ratios"]["kafka"]["recorded_per_s"] == 0.5
    for name in ("postgres", "kafka"):
        assert summary.read(tmp_path / name)["scenario"] == "burst"
        assert (tmp_path / name / "report.html").exists()
    assert (tmp_path / "report.html").exists()
    assert conclude_all({"postgres": burst(2.0, missing=1)}, tmp_path, silent()) == EXIT_BAD


def test_folders_are_named_by_as_much_as_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "monday" / "burst", tmp_path / "tuesday" / "burst"]
    for folder in folders:
        summary.write(folder, burst(1.0))

    assert list(read_all(folders)) == ["monday/burst", "tuesday/burst"]
    assert list(read_all(folders[:1])) == ["burst"]
    assert len(read_all([folders[0], folders[0]])) == 2


def test_a_folder_without_a_summary_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("[]")

    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=str(folder)):
            read_all([folder])
