"""The size of a run folder, also while the run lives."""

import os
from pathlib import Path

import pytest

from penstock.config import BusConfig, SecurityConfig
from services.cli.runs.folders import FolderOfRun
from services.launch.run_folder import RunFolder


def test_files_that_go_while_they_are_looked_at_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run removes old checkpoints and spans."""
    (tmp_path / "deep").mkdir()
    for name, size in (("a", 10), ("deep/b", 20), ("deep/gone", 40)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "link").symlink_to(tmp_path / "a")

    def lstat(path: str) -> os.stat_result:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return real(path)

    real = os.lstat
    run = FolderOfRun(folder=RunFolder(tmp_path), run="r", bus=BusConfig(), security=SecurityConfig())
    assert run.size_bytes == 70
    monkeypatch.setattr("services.cli.runs.folders.os.lstat", lstat)
    assert run.size_bytes == 30
