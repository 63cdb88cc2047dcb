"""A `penstock train` under test: started as a user would, watched through its files, killed by pid."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "tiny-cpu.toml"

_HANG_S = 120.0
"""A killed trainer's successor imports, waits until the lock has lapsed and starts its ranks: 25 s on slow cores."""
_GONE_S = 30.0
_RANK = "services.trainer.backend.ranks.follower"


@dataclass(slots=True)
class TrainProcess:
    """One launch of a run."""

    process: "subprocess.Popen[bytes]"
    runs: Path
    mark: str
    """A value in the environment of the launcher, and so of everything that it starts."""
    output: Path

    @property
    def folder(self) -> Path:
        """The run folder; fails before it exists."""
        (folder,) = [path for path in self.runs.iterdir() if path.is_dir() and path.name != "prometheus"]
        return folder

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of finished steps."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except (OSError, ValueError):
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_step(self, step: int, timeout_s: float = 180.0) -> None:
        """Wait until optimizer step `step` is in the metrics."""
        self.wait_until(lambda: any(row["step"] >= step for row in self.rows()), f"step {step}", timeout_s)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for a condition; fail if the run ends first."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"the run ended with {self.process.returncode}" if ended else f"not within {timeout_s} s"
                raise AssertionError(f"waited for {what}: {why}\n{self.tail()}")
            time.sleep(0.1)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s\n{self.tail()}") from None

    def processes(self) -> dict[str, int]:
        """Return process ids of the running services by their launcher names, including nats-server, and rank-1 and so
        on of a trainer of several ranks."""
        found = {}
        for pid in self.pids():
            arguments = _arguments(pid)
            if Path(arguments[0]).name == "nats-server":
                found["nats"] = pid
            if _RANK in arguments:
                found[f"rank-{arguments[arguments.index(_RANK) + 1]}"] = pid
            if "serve" in arguments and "--name" in arguments and _leads_its_session(pid):
                found[arguments[arguments.index("--name") + 1]] = pid
        return found

    def pid_of(self, service: str) -> int:
        """Return a process id of the service; the first by name if there are several."""
        for name, pid in sorted(self.processes().items()):
            if name == service or name.startswith(f"{service}-"):
                return pid
        raise AssertionError(f"no process serves {service}")

    def kill(self, service: str) -> None:
        """kill -9 the service, and wait until another process has replaced it."""
        self._replace(service, signal.SIGKILL)

    def freeze(self, service: str) -> None:
        """Stop the service for good, and wait until another process has replaced it."""
        self._replace(service, signal.SIGSTOP)

    def _replace(self, service: str, blow: signal.Signals) -> None:
        victim = self.pid_of(service)
        name = next(name for name, pid in self.processes().items() if pid == victim)
        os.kill(victim, blow)
        self.wait_until(lambda: self.processes().get(name, victim) != victim, f"a new {name}", _HANG_S)

    def pids(self) -> list[int]:
        """Return every living process that descends from this launch."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if self.mark.encode() in environment and not is_zombie:
                found.append(int(entry.name))
        return sorted(found)

    def left_behind(self) -> list[int]:
        """Return what still lives after the launcher's end; what it killed last takes the kernel a moment."""
        deadline = time.monotonic() + _GONE_S
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return pids

    def tail(self) -> str:
        """Return the end of the launcher's and the services' logs, for a failed assertion."""
        logs = sorted((self.folder / "logs").glob("*.log")) if self.runs.exists() and any(self.runs.iterdir()) else []
        parts = [f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]) for path in logs]
        return "\n".join([self.output.read_text(errors="replace")[-3000:], *parts])


@contextmanager
def started(tmp_path: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[TrainProcess]:
    """Run `penstock train` with `arguments` (recipe, overrides), run folder below `tmp_path`; leave nothing behind.

    `environment` is added to this process's.
    """
    mark = f"penstock-test-{uuid.uuid4().hex}"
    # The launcher's processes do not look in their working directory, and the environment may belong to another tree.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    runs, output = tmp_path / "runs", tmp_path / f"output-{mark[-6:]}.txt"
    scratch = tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True)  # killed processes leave files
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "train", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                **(environment or {}),
                "PENSTOCK_TEST_MARK": mark,
                "TMPDIR": scratch.name,
                "PYTHONPATH": paths,
            },
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    run = TrainProcess(process, runs, mark, output)
    try:
        yield run
    finally:
        for pid in run.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(10)
        scratch.cleanup()


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def _leads_its_session(pid: int) -> bool:
    """Return whether a process leads its session, which tells it from a service's forked children with equal names."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
