"""The folder of a run: made, locked, read and removed."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import SetupError
from services.launch.run_folder import RunFolder
from services.recipe import Recipe


def test_two_runs_in_one_second_have_two_folders(recipe: Recipe) -> None:
    """Each run gets a folder of its own below run.dir, named by the run and the time."""
    folders = [RunFolder.create(recipe.run).path for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.parent == recipe.run.dir and folder.name.startswith("r-20") for folder in folders)


def test_the_place_of_a_run_folder_is_known_before_it_is_made(recipe: Recipe) -> None:
    """The nearest folder that is there; one that cannot be made is refused as the start refuses it."""
    place = recipe.run.dir.parent
    assert RunFolder.place(recipe.run) == place
    assert RunFolder.place(recipe.run.model_copy(update={"folder": place / "mine" / "first"})) == place
    recipe.run.dir.mkdir()
    assert RunFolder.place(recipe.run) == recipe.run.dir
    assert list(recipe.run.dir.iterdir()) == []
    file = recipe.run.dir / "file"
    file.touch()
    under_file = recipe.run.model_copy(update={"dir": file / "runs"})
    for make in (RunFolder.place, RunFolder.create):
        with pytest.raises(SetupError, match=r"^run\.dir = '.*/file/runs' cannot be made: Not a directory; choose"):
            make(under_file)


def test_written_config_is_the_recipe(recipe: Recipe) -> None:
    """The run folder's config.toml reads back as the same recipe."""
    folder = RunFolder.create(recipe.run)
    folder.write_config(recipe)
    assert load(Recipe, [folder.config_file]) == recipe
    assert RunFolder.open(folder.path) == folder


def test_a_run_is_started_like_one_in_a_given_folder(recipe: Recipe, tmp_path: Path) -> None:
    """The written recipe does not name the folder, which holds a run already."""
    given = recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": tmp_path / "mine"})})
    folder = RunFolder.create(given.run)
    folder.write_config(given)
    again = load(Recipe, [folder.config_file])
    assert again == recipe
    assert RunFolder.create(again.run).path.parent == recipe.run.dir


IN_ASCII = """
import locale, sys
from pathlib import Path
from penstock.config import load
from services.cli.runs.folders import read_folder
from services.launch.run_folder import RunFolder
from services.recipe import Recipe
from services.view.run_reader import RunReader

assert "utf" not in locale.getencoding().lower()
given = load(Recipe, [Path(sys.argv[1])])
assert given.run.dir == Path("l\\u00e4ufe")
folder = RunFolder(Path(sys.argv[2]))
folder.write_config(given)
folder.write_live(given)
assert load(Recipe, [folder.config_file]) == load(Recipe, [folder.live_file]) == given
assert read_folder(folder.path).run == RunReader(folder.path).settings()["run.name"] == "here"
"""


def test_recipes_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    """As TOML is: a run can be continued, listed and viewed in another locale than the one it began in."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes('[run]\nname = "here"\ndir = "läufe"\n'.encode())
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", IN_ASCII, recipe, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_folders_begin_in_the_home_of_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder `~` is made in the working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder.create(load(Recipe, [], ["--run.dir=~/runs"]).run).path.parent == tmp_path / "runs"
    assert RunFolder.create(load(Recipe, [], ["--run.folder=~/mine"]).run).path == tmp_path / "mine"
    assert list(Path().iterdir()) == []


def test_no_run_is_made_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the variable is not set that was to name its folder, it has one of its own."""
    monkeypatch.chdir(tmp_path)
    assert RunFolder.create(load(Recipe, [], ["--run.folder="]).run).path.parent == Path("runs")


def test_given_folder_is_used_once(recipe: Recipe, tmp_path: Path) -> None:
    """run.folder is taken as it is, and refused when it holds a run."""
    run = recipe.run.model_copy(update={"folder": tmp_path / "mine"})
    folder = RunFolder.create(run)
    assert folder.path == tmp_path / "mine"
    folder.write_config(recipe)
    with pytest.raises(SetupError, match="--resume"):
        RunFolder.create(run)


def test_a_folder_is_discarded_before_anything_began(recipe: Recipe) -> None:
    """With the recipe, the launcher's log and what is empty; a process's log, a result or a stranger's file stays."""
    for name, text in (
        ("metrics.jsonl", ""),
        ("logs/trainer.log", "x"),
        ("samples.jsonl", "{}"),
        ("notes.txt", "mine"),
    ):
        folder = RunFolder.create(recipe.run)
        with folder.locked():
            folder.write_config(recipe)
            folder.launcher_log.write_text("data.checking")
            (folder.path / "checkpoints/.writer-1").mkdir(parents=True)
            (folder.path / name).write_text(text)
        assert folder.discard_unused() == (not text)
        assert folder.path.exists() == folder.config_file.exists() == bool(text)


def test_a_folder_in_use_is_not_discarded(recipe: Recipe) -> None:
    """Whoever works in it has just taken the lock."""
    folder = RunFolder.create(recipe.run)
    folder.write_config(recipe)
    with folder.locked():
        assert not folder.discard_unused()
    assert folder.config_file.exists()


def test_a_folder_that_cannot_be_made_is_named(recipe: Recipe, tmp_path: Path) -> None:
    """By the setting that names it."""
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "run"
    with pytest.raises(SetupError, match=f"run.folder = '{inside}' cannot be made: Not a directory; choose another"):
        RunFolder.create(recipe.run.model_copy(update={"folder": inside}))
    with pytest.raises(SetupError, match=f"run.dir = '{inside}' cannot be made: Not a directory; choose another"):
        RunFolder.create(recipe.run.model_copy(update={"dir": inside}))


def test_a_folder_that_cannot_be_locked_is_named(recipe: Recipe) -> None:
    """As one that belongs to somebody else."""
    folder = RunFolder.create(recipe.run)
    (folder.path / ".lock").mkdir()  # refused to every user, the administrator included
    with pytest.raises(SetupError, match=f"{folder.path} cannot be written"), folder.locked():
        pass


def test_second_launcher_is_kept_out(recipe: Recipe) -> None:
    """Two launchers cannot work in one folder; after the first has ended the second may."""
    folder = RunFolder.create(recipe.run)
    with folder.locked(), pytest.raises(SetupError, match="running"), folder.locked():
        pass
    with folder.locked():
        pass


def test_the_command_that_has_the_folder_is_known(recipe: Recipe) -> None:
    """Whoever else wants to have it changes nothing of that; a folder that nobody used yet has none."""
    folder = RunFolder.create(recipe.run)
    assert folder.command == ""
    with folder.locked():
        folder.note_command("penstock sft")
        with pytest.raises(SetupError, match="running"), folder.locked():
            pass
    with folder.locked():
        pass
    assert folder.command == "penstock sft"
    assert folder.discard_unused()


def test_a_look_at_the_lock_keeps_no_launcher_out(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock status` and the like hold it for a moment; the launcher tries again."""
    folder = RunFolder.create(recipe.run)
    with (folder.path / ".lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with folder.locked():
            pass


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_folder_that_is_deleted_meanwhile_is_not_used(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    """The lock of its removed file would keep nobody out."""
    folder = RunFolder.create(recipe.run)
    with (folder.path / ".lock").open("w") as deleting:
        fcntl.flock(deleting, fcntl.LOCK_EX)

        def delete(_: float) -> None:
            folder.clear()
            folder.remove_cleared()
            if is_made_again:
                folder.path.mkdir()
                (folder.path / ".lock").touch()
            fcntl.flock(deleting, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", delete)
        with pytest.raises(SetupError, match="has just been deleted"), folder.locked():
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lustre that is mounted without flock, and NFS without lockd."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = RunFolder.create(recipe.run)
    with pytest.raises(SetupError, match=rf"{folder.path} cannot be locked: .*flock.*run\.dir"), folder.locked():
        pass
