"""CI's runner ends in time, with the tests' own exit code, and leaves no process behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

_RUNNER = Path(__file__).parents[2] / ".ci" / "run_tests.py"


def _run(folder: Path, tests: str, seconds: float = 120.0) -> tuple[int, list[str]]:
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "Makefile").write_text(f"test:\n\t@{sys.executable} -m pytest\n")
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
    code, lines = _run(tmp_path, "def test_passes(): pass\n")
    assert code == 0
    assert "1 passed" in lines[-1]
    assert "failed" not in lines[-1]


def test_a_failed_test_fails_the_run(tmp_path: Path) -> None:
    """It is not tried again, and pytest's own line counts it."""
    code, lines = _run(tmp_path, "def test_passes(): pass\ndef test_fails(): raise AssertionError\n")
    assert code
    assert "1 failed, 1 passed" in lines[-1]


def test_no_process_outlives_the_run(tmp_path: Path) -> None:
    """One that a test left behind is named and ended, also in a session of its own, and fails the run."""
    child = 'subprocess.Popen(["sleep", "600"], start_new_session=True)'
    body = f"    child = {child}\n    open('pid', 'w').write(str(child.pid))\n"
    code, lines = _run(tmp_path, f"import subprocess\ndef test_it():\n{body}")
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid)
    assert code == 1
    assert lines[-1] == f"LEFT BEHIND {pid} sleep 600"


def test_tests_that_do_not_end_in_time_are_ended(tmp_path: Path) -> None:
    """The closing line counts that as a failure."""
    code, lines = _run(tmp_path, "import time\ndef test_it(): time.sleep(600)\n", seconds=0.0)
    assert code == 1
    assert lines[-1] == "the tests did not end in 0 s: 0 passed, 1 failed"
