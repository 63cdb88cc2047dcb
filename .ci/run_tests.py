"""Run `make test`; run tests that failed once more by themselves; print one truthful closing line.

A test that passes alone is printed as FLAKY. The run fails if one fails again, if more than `MOST_FLAKY` failed, or if
the tests do not end in time. No process that a test started outlives this one.

    python .ci/run_tests.py SECONDS
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil

MOST_FLAKY = 3
_STOP_S = 20.0
_ENDING_S = 5.0
"""What is about to end when the tests have ended, such as a resource tracker, may take this long."""
_MARK = "PENSTOCK_CI_RUN"
"""This variable in a process's environment shows that it belongs to this run."""


@dataclasses.dataclass(slots=True)
class _Outcome:
    """What one run of pytest said."""

    passed: set[str]
    failed: list[str]
    """In the order in which they failed."""
    unfinished: list[str]
    timed_out: bool = False
    returncode: int = 0


def main(seconds: float) -> int:
    """Run the tests within `seconds`; return the exit code."""
    ends_at = time.monotonic() + seconds
    os.environ[_MARK] = uuid.uuid4().hex
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-ci-") as folder:
            return _run(Path(folder), ends_at)
    finally:
        _end_processes()


def _run(folder: Path, ends_at: float) -> int:
    whole = _play(["make", "test", f"ARGS=-p outcomes --outcomes={folder / 'whole'}"], folder / "whole", ends_at)
    left_behind = [] if whole.timed_out else _end_processes(grace_s=_ENDING_S)
    for process in left_behind:
        print("LEFT BEHIND", process)
    if whole.returncode == 0 and not whole.timed_out:
        # Without anything to add, pytest's closing line stays the last one.
        return _close(whole.passed, []) if left_behind else 0
    if whole.failed and not whole.unfinished and len(whole.failed) <= MOST_FLAKY:
        return _run_again(whole, folder, ends_at)
    why = "the tests did not end in time" if whole.timed_out else f"make test ended with {whole.returncode}"
    return _close(whole.passed, [*whole.failed, *whole.unfinished] or [why])


def _run_again(whole: _Outcome, folder: Path, ends_at: float) -> int:
    flaky, failed = [], []
    for number, test in enumerate(whole.failed):
        outcomes = folder / str(number)
        command = [sys.executable, "-m", "pytest", "-p", "outcomes", f"--outcomes={outcomes}", test]
        alone = _play(command, outcomes, ends_at)
        (flaky if alone.returncode == 0 and alone.passed else failed).append(test)
    print()
    for test in flaky:
        print("FLAKY", test)
    return _close(whole.passed | set(flaky), failed)


def _close(passed: set[str], failed: Sequence[str]) -> int:
    """Print what failed and the closing line; return the exit code."""
    for test in failed:
        print("FAILED", test)
    print(f"{len(passed.difference(failed))} passed, {len(failed)} failed", flush=True)
    return 1 if failed else 0


def _play(command: list[str], outcomes: Path, ends_at: float) -> _Outcome:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *_python_path()])}
    process = subprocess.Popen(command, env=environment)
    timed_out = False
    try:
        process.wait(max(ends_at - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        timed_out = True
        _end_processes()
        process.wait()
    outcome = _read(outcomes)
    outcome.timed_out, outcome.returncode = timed_out, process.returncode
    return outcome


def _python_path() -> list[str]:
    return [path] if (path := os.environ.get("PYTHONPATH")) else []


def _read(path: Path) -> _Outcome:
    passed: set[str] = set()
    failed: dict[str, None] = {}
    running: dict[str, None] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, event = json.loads(line)
        match event:
            case "started":
                running[test] = None
            case "finished":
                running.pop(test, None)
            case "passed":
                passed.add(test)
            case "failed":
                failed[test] = None
    return _Outcome(passed - failed.keys(), list(failed), list(running))


def _end_processes(grace_s: float = 0.0) -> list[str]:
    """Terminate, then kill, every process of this run that does not end within `grace_s`; return their names."""
    psutil.wait_procs(_processes(), timeout=grace_s)
    names: dict[str, None] = {}
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in (processes := _processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                names[f"{process.pid} {' '.join(process.cmdline())[:200]}"] = None
                stop(process)
        psutil.wait_procs(processes, timeout=_STOP_S)
    return list(names)


def _processes() -> list[psutil.Process]:
    """All processes that this one started, and those that they started, whoever their parents are now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == os.environ[_MARK]:
                found.append(process)
    return found


def _interrupted(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
