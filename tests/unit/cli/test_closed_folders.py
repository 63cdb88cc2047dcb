"""What the command line says of a folder that another user has closed."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from services.cli import main


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "CLOSED/recipe.toml"),
        ("train", "tiny-cpu", "--model.path=CLOSED/model"),
        ("train", "tiny-cpu", "--data.path=CLOSED/rows.jsonl"),
        ("train", "--resume", "CLOSED"),
        ("runs", "delete", "CLOSED", "--yes"),
        ("scale", "CLOSED", "worker=2"),
        ("status", "CLOSED"),
        ("view", "CLOSED"),
        ("export", "CLOSED", "out"),
    ],
    ids=" ".join,
)
def test_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """In one line, whatever is looked for in it. The administrator, who may run this test, would find it."""
    closed, stat = tmp_path / "closed", os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert main([each.replace("CLOSED", str(closed)) for each in arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {closed}/")
    assert said.err.endswith(": Permission denied; change its rights or its folder's, or name another path\n")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_refusal_of_anything_but_a_path_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its traceback, as any other fault of the program."""

    def fail(*_: object, **__: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("services.cli.app.expand_paths", fail)
    with pytest.raises(PermissionError):
        main(["version"])
