"""What a command does with the run folder that it takes, before it starts anything in it."""

import asyncio
import errno
import functools
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import SetupError
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.cli.app import main
from services.cli.arguments import load_run
from services.cli.train.command import run_in_folder
from services.launch import launcher
from services.launch.run_folder import RunFolder
from services.recipe import Recipe
from tests.support.waiting import HANG_S


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


async def launch(stop: asyncio.Event) -> bool:
    """Start nothing."""
    return True


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

    async def launch(stop: asyncio.Event) -> bool:
        full()
        return True

    folder = RunFolder.create(recipe.run)
    with pytest.raises(SetupError, match=f"make room and continue with `penstock train --resume {folder.path}`"):
        run_in_folder(recipe, folder, launch, is_new=True, view=False)
    assert RunFolder.open(folder.path) == folder


def resume(recipe: Recipe, *overrides: str) -> tuple[int, bytes, bytes]:
    """Continue a run in its folder: the exit code, and its config.toml before and after."""
    folder = RunFolder.create(recipe.run)
    folder.write_config(recipe)
    shutil.rmtree(folder.logs)  # as a person may
    before = folder.config_file.read_bytes()
    settings, _ = load_run([], list(overrides), resume=folder.path)
    run = functools.partial(launcher.launch, settings, folder, security=Security())
    code = run_in_folder(settings, folder, run, is_new=False, view=False)
    return code, before, folder.config_file.read_bytes()


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(recipe: Recipe) -> None:
    """The override that was refused is not kept: without it, the run goes on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, before, after = resume(recipe, f"--router.port={taken.getsockname()[1]}")
    assert code == 2
    assert after == before


def test_a_resume_is_a_start_from_its_first_moment(recipe: Recipe) -> None:
    """Viewers take the time of config.toml for it: steps of an earlier start do not make this one look stuck."""

    async def launch(stop: asyncio.Event) -> bool:
        ages_s.append(time.time() - folder.config_file.stat().st_mtime)
        return True

    ages_s: list[float] = []
    folder = RunFolder.create(recipe.run)
    folder.write_config(recipe)
    os.utime(folder.config_file, (0, 0))
    run_in_folder(recipe, folder, launch, is_new=False, view=False)
    assert ages_s == [pytest.approx(0, abs=HANG_S)]


def test_a_resume_that_goes_on_keeps_its_overrides(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """From before its first process is started, so that a launcher that is killed is continued with them."""
    kept: list[Recipe] = []

    async def run_processes(_: object, folder: RunFolder, *__: object, **___: object) -> bool:
        kept.append(load(Recipe, [folder.config_file]))
        return True

    monkeypatch.setattr(launcher, "run_processes", run_processes)
    code, *_ = resume(recipe, "--trainer.keep_checkpoints=7")
    assert (code, [each.trainer.keep_checkpoints for each in kept]) == (0, [7])


@pytest.mark.parametrize(("is_complete", "code"), [(True, 0), (False, 130)])
def test_a_signal_after_all_is_done_has_interrupted_nothing(recipe: Recipe, is_complete: bool, code: int) -> None:
    """As Ctrl-C while the processes of a complete run end."""

    async def launch(stop: asyncio.Event) -> bool:
        signal.raise_signal(signal.SIGINT)
        await stop.wait()
        return is_complete

    assert run_in_folder(recipe, RunFolder.create(recipe.run), launch, is_new=True, view=False) == code


def test_a_view_without_its_packages_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the extra to install, and no run folder."""
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "services.view.app", raising=False)
    assert main(["train", "tiny-cpu", "--view", f"--run.dir={tmp_path}/runs", "--model.path=nowhere"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: `penstock train --view` needs the Python package 'fastapi'")
    assert "penstock[view]" in line
    assert list(tmp_path.iterdir()) == []
