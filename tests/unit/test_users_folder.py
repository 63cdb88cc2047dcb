"""Nothing of the folder in which a person starts Penstock is imported unasked, whatever its files are called."""

import ast
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

_NAMES = ("grpc", "numpy", "penstock", "pydantic", "services", "sympy", "tests", "torch")
"""Modules that the folder has, and Penstock or its packages have as well."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A person's folder, whose modules say that they were imported and end the process."""
    for name in _NAMES:
        (tmp_path / f"{name}.py").write_text(f"import sys\nsys.exit('{name}.py was imported')\n")
    return tmp_path


def _run(folder: Path, *arguments: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    """Run the `penstock` command as its script does, in a folder and with a PYTHONPATH."""
    program = "import sys; from penstock.command import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "config tiny-cpu",
        "train tiny-cpu --dry-run",
        pytest.param("plan tiny-cpu --gpus 8x80", marks=pytest.mark.variant),
    ],
)
def test_a_command_imports_nothing_of_its_folder(folder: Path, command: str) -> None:
    """Those that only read settings, and those that look at models."""
    done = _run(folder, *command.split())
    assert (done.returncode, done.stderr) == (0, "")


def test_the_reward_service_s_workers_import_nothing_of_their_folder(folder: Path) -> None:
    """An expression goes to a worker, which is forked from a process that has imported sympy."""
    line = {"id": "a", "gold": r"\frac{1}{x+1}", "response": r"\boxed{(1+x)^{-1}}", "profile": "math"}
    (folder / "answers.jsonl").write_text(json.dumps({**line, "deadline_s": 30}) + "\n")
    done = _run(folder, "score", "answers.jsonl", "--reward.workers=1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "OK"
    assert json.loads(done.stdout)["score"] == 1.0


def _interpreter_calls() -> Iterator[tuple[str, str]]:
    """Where a process of this interpreter is started, and its first option."""
    for file in (*(ROOT / "penstock").rglob("*.py"), *(ROOT / "services").rglob("*.py")):
        if "testing" in file.relative_to(ROOT).parts:
            continue  # starts what tests and benchmarks need, from a checkout
        for node in ast.walk(ast.parse(file.read_text())):
            listed = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
            for first, second in itertools.pairwise(listed):
                if ast.unparse(first) == "sys.executable":
                    second = second.value if isinstance(second, ast.Starred) else second
                    second = second.elts[0] if isinstance(second, ast.Tuple) else second
                    yield f"{file.relative_to(ROOT)}:{first.lineno}", ast.unparse(second).strip("'")


def test_every_process_of_this_interpreter_leaves_its_folder_out() -> None:
    """`python -m` and `python -c` put the working directory first; -P and -I do not."""
    calls = list(_interpreter_calls())
    assert len(calls) >= 5
    assert [(where, option) for where, option in calls if option not in ("-P", "-I")] == []


@pytest.mark.parametrize("kind", ["module", "package"])
def test_another_package_of_the_name_is_refused(tmp_path: Path, kind: str) -> None:
    """In one line that says where it is; nothing of it is imported."""
    file = tmp_path / ("services.py" if kind == "module" else "services/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("print('imported')\n")
    done = _run(tmp_path, "version", path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: another package, {file}, answers to the name services")
    assert str(ROOT / "services") in line


def test_a_folder_of_the_name_is_no_hindrance(tmp_path: Path) -> None:
    """Python prefers a package with an __init__.py over a folder without one, even if the folder comes first."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "mine.py").write_text("")
    done = _run(tmp_path, "version", path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")
