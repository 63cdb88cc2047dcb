"""`~` in a path on the command line, where no shell has expanded it: behind `--option=`, and in quotes."""

from pathlib import Path

import pytest

from services.cli import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, which is not the working directory."""
    folder = tmp_path / "home"
    (folder / "runs/one").mkdir(parents=True)
    (folder / "mine.toml").write_text("run.name = 'mine'\n")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("runs", "list", "~/runs"), "no runs in HOME/runs"),
        (("status", "~/runs/one"), "HOME/runs/one holds no run"),
        (("scale", "~/runs/one", "worker=2"), "HOME/runs/one holds no run"),
        (("train", "--resume=~/runs/one"), "--resume HOME/runs/one: no config.toml in it"),
        (("bus", "--config=~/none.toml"), "recipe HOME/none.toml cannot be read"),
        (("bus", "letters", "--config=~/none.toml"), "recipe HOME/none.toml cannot be read"),
        (("serve", "router", "--config=~/none.toml"), "recipe HOME/none.toml cannot be read"),
        (("config", "~/none.toml"), "recipe HOME/none.toml cannot be read"),
        (("config", "tiny-cpu", "~/none.toml"), "recipe HOME/none.toml cannot be read"),
        (("config", "tiny-cpu", "~/mine.toml"), 'name = "mine"'),
        (("status", "~no-one/run"), "~no-one/run: no home folder is known for '~no-one'; write out the path"),
    ],
)
def test_it_is_the_home_folder(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    """In every option and argument that is a path, of every command, and in no other."""
    main(list(arguments))
    said = capsys.readouterr()
    assert named.replace("HOME", str(home)) in said.out + said.err


def test_files_are_written_there(home: Path, tmp_path: Path) -> None:
    """And not into a folder `~`."""
    assert main(["init", "tiny-cpu", "~/new.toml"]) == 0
    assert (home / "new.toml").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
