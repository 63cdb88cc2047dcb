"""What a command does with the run folder that it takes, before it starts anything in it."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import SetupError
from penstock.telemetry import log
from services.cli.train.command import run_in_folder
from services.launch.run_folder import RunFolder
from services.recipe import Recipe


@pytest.fixture(autouse=True)
def without_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's file is open until a process ends."""
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe that keeps its runs in `tmp_path`."""
    return load(Recipe, [], [f"--run.dir={tmp_path}", f"--model.path={tmp_path}"])


def full(*_: Any) -> None:
    """Write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def launch(stop: asyncio.Event) -> None:
    """Start nothing."""


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_before_the_start_is_one_line(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """A new folder is removed; that of an earlier run keeps its recipe."""
    folder = RunFolder.create(recipe.run)
    if not is_new:
        folder.write_config(recipe)
    monkeypatch.setattr("services.launch.run_folder.write_atomically", full)
    with pytest.raises(SetupError, match=r"No space left on device; .* make room and start the command again"):
        run_in_folder(recipe, folder, launch, is_new=is_new, view=False)
    assert folder.path.exists() is not is_new
    assert folder.config_file.exists() is not is_new


def test_a_full_disk_at_the_start_is_one_line(recipe: Recipe) -> None:
    """With the command that continues the run."""

    async def launch(stop: asyncio.Event) -> None:
        full()

    folder = RunFolder.create(recipe.run)
    with pytest.raises(SetupError, match=f"make room and continue with `penstock train --resume {folder.path}`"):
        run_in_folder(recipe, folder, launch, is_new=True, view=False)
    assert RunFolder.open(folder.path) == folder
