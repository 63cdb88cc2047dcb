"""A launcher in a process of its own, whose processes are small programs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import is_alive
from tests.support.waiting import HANG_S, wait_until

PROGRAM = Path(__file__).with_name("launcher_process.py")
NOTE = """
import os, signal, subprocess, sys, time
def note(word):
    with open("notes", "a") as file:
        file.write(f"{word} {os.getpid()}\\n")
"""
SERVE = (
    NOTE
    + """
def stop(*_):
    note("stopped-" + NAME)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("up")
while True:
    time.sleep(0.05)  # no pause(): it would sleep on after a signal that came just before
"""
)
STUBBORN = (
    NOTE
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("up")
time.sleep(600)
"""
)
PARENT = (
    NOTE
    + """
program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", program])
with open("notes", "a") as file:
    file.write(f"grandchild {child.pid}\\n")
note("up")
time.sleep(600)
"""
)


class FakeRun:
    """A launcher in a process of its own, with its processes' notes."""

    def __init__(self, folder: Path, specs: list[dict[str, Any]], **config: Any) -> None:
        config = {"kill_after_s": 20.0, **config}
        for spec in specs:
            spec["program"] = f"NAME = {spec['name']!r}\n{spec['program']}"
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, folder, json.dumps(specs), json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def notes(self, word: str) -> list[int]:
        """Ids of the processes that noted `word`, in order."""
        lines = (self.folder / "notes").read_text().splitlines() if (self.folder / "notes").exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == word]

    def wait_for(self, word: str, count: int = 1) -> list[int]:
        """Wait until `count` processes noted `word`."""
        wait_until(lambda: len(self.notes(word)) >= count or self.process.poll() is not None)
        assert len(self.notes(word)) >= count, self.process.communicate()
        return self.notes(word)

    def finish(self, timeout_s: float = HANG_S) -> tuple[int, str, str]:
        """Wait for the end of the launcher: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def all_pids(self) -> set[int]:
        """Every process that noted anything, and grandchildren."""
        return {int(line.split()[1]) for line in (self.folder / "notes").read_text().splitlines()}


def assert_all_gone(run: FakeRun) -> None:
    """No process of the run is alive, after the blink that the kernel takes."""
    pids = run.all_pids()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert [pid for pid in pids if is_alive(pid)] == []
