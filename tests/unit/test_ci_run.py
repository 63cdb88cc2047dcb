"""CI runs failed tests once more by themselves, and its closing line counts what came of all of them."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

_RUNNER = Path(__file__).parents[2] / ".ci" / "run_tests.py"

_FAILS_ONCE = """
import pathlib
def test_{name}(tmp_path_factory):
    seen = pathlib.Path("{name}.seen")
    try:
        assert seen.exists()
    finally:
        seen.touch()
"""
_PASSES = "def test_passes(): pass\n"
_FAILS = "def test_fails(): raise AssertionError\n"


def _run(folder: Path, tests: str, seconds: float = 120.0) -> tuple[int, list[str]]:
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "Makefile").write_text(f"test:\n\t@{sys.executable} -m pytest $(ARGS)\n")
    done = subprocess.run(
        [sys.executable, str(_RUNNER), str(seconds)],
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return done.returncode, done.stdout.splitlines()


def test_pytests_own_line_closes_a_green_run(tmp_path: Path) -> None:
    """Nothing is added to it."""
    code, lines = _run(tmp_path, _PASSES)
    assert code == 0
    assert "1 passed" in lines[-1]
    assert "failed" not in lines[-1]


def test_a_test_that_passes_alone_is_named_flaky(tmp_path: Path) -> None:
    """The run passes, and its closing line counts the test once."""
    code, lines = _run(tmp_path, _PASSES + _FAILS_ONCE.format(name="a"))
    assert code == 0
    assert lines[-2:] == ["FLAKY test_it.py::test_a", "2 passed, 0 failed"]


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    """Flaky ones beside it are named all the same."""
    code, lines = _run(tmp_path, _PASSES + _FAILS + _FAILS_ONCE.format(name="a"))
    assert code == 1
    assert lines[-3:] == ["FLAKY test_it.py::test_a", "FAILED test_it.py::test_fails", "2 passed, 1 failed"]


def test_more_than_three_failures_are_not_forgiven(tmp_path: Path) -> None:
    """They would all pass alone, and are not run again."""
    code, lines = _run(tmp_path, _PASSES + "".join(_FAILS_ONCE.format(name=name) for name in "abcd"))
    assert code == 1
    assert lines[-1] == "1 passed, 4 failed"


def test_an_error_in_a_fixture_is_a_failure(tmp_path: Path) -> None:
    """Whether the test itself passed does not matter."""
    fixture = "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    raise AssertionError\n"
    code, lines = _run(tmp_path, fixture + _PASSES + "def test_it(broken): pass\n")
    assert code == 1
    assert lines[-2:] == ["FAILED test_it.py::test_it", "1 passed, 1 failed"]


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    """Pytest's own exit code says so as well, with no test to name."""
    code, lines = _run(tmp_path, "import no_such_module\n")
    assert code == 1
    assert lines[-2:] == ["FAILED test_it.py", "0 passed, 1 failed"]


def test_no_process_outlives_the_run(tmp_path: Path) -> None:
    """One that a test left behind is named and ended, also in a session of its own."""
    child = 'subprocess.Popen(["sleep", "600"], start_new_session=True)'
    body = f"    child = {child}\n    open('pid', 'w').write(str(child.pid))\n"
    code, lines = _run(tmp_path, f"import subprocess\ndef test_it():\n{body}")
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid)
    assert code == 0
    assert lines[-2:] == [f"LEFT BEHIND {pid} sleep 600", "1 passed, 0 failed"]


def test_tests_that_do_not_end_in_time_are_ended(tmp_path: Path) -> None:
    """The closing line counts that as a failure."""
    code, lines = _run(tmp_path, "import time\ndef test_it(): time.sleep(600)\n", seconds=0.0)
    assert code == 1
    assert lines[-2:] == [
        "FAILED the tests did not end in time",
        "0 passed, 1 failed",
    ]
