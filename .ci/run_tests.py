"""Run `make test SLOW=yes` within a time limit; end and name every process that the tests left behind.

The run fails if a test fails, if the tests do not end in time, or if a process outlives them.

    python .ci/run_tests.py SECONDS
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from typing import NoReturn

import psutil

_STOP_S = 20.0
_ENDING_S = 5.0
"""What is about to end when the tests have ended, such as a resource tracker, may take this long."""
_MARK = "PENSTOCK_CI_RUN"
"""This variable in a process's environment shows that it belongs to this run."""


def main(seconds: float) -> int:
    """Run the tests within `seconds`; return the exit code."""
    ends_at = time.monotonic() + seconds
    os.environ[_MARK] = uuid.uuid4().hex
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        tests = subprocess.Popen(["make", "test", "SLOW=yes"])
        try:
            code = tests.wait(max(ends_at - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _end_processes()
            print(f"the tests did not end in {seconds:.0f} s: 0 passed, 1 failed", flush=True)
            return 1
        left_behind = _end_processes(grace_s=_ENDING_S)
        for process in left_behind:
            print("LEFT BEHIND", process, flush=True)
        return code or bool(left_behind)
    finally:
        _end_processes()


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
