"""Runs commands of `penstock`, and follows one that trains the demo recipe step by step."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from penstock.runtime.children.parent_death import dying_with_parent
from services.launch.metrics import MetricsFollower, StepRow

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "tiny-cpu.toml"
PENSTOCK = (sys.executable, "-m", "services.cli")
"""The command `penstock` of this tree."""

_POLL_S = 0.02
_END_TIMEOUT_S = 60.0
_EXIT_INTERRUPTED = 130
"""Exit code of a run that was told to end, as `on_step` may do."""


@contextmanager
def running(*arguments: str, command: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of `penstock`, which is `PENSTOCK` or `command`; its processes are gone when the context ends."""
    process = subprocess.Popen(
        [*(command or PENSTOCK), *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        preexec_fn=dying_with_parent(),  # a signal may come before the `try`
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=_END_TIMEOUT_S)


def run_to_end(*arguments: str) -> None:
    """Run a command of `penstock`.

    Raises:
        CalledProcessError: it failed.
    """
    with running(*arguments) as process:
        if code := process.wait():
            raise subprocess.CalledProcessError(code, process.args)


def training(
    folder: Path, overrides: Sequence[str] = (), *, command: Sequence[str] = ()
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run the demo with `folder` as its run folder, as `running` does."""
    return running("train", str(RECIPE), f"--run.folder={folder}", *overrides, command=command)


def follow(
    process: subprocess.Popen[bytes], folder: Path, on_step: Callable[[StepRow], None] = lambda _: None
) -> list[StepRow]:
    """Call `on_step` with each step's metrics as they are written; return them all when the run has ended.

    Raises:
        SystemExit: the run failed.
    """
    metrics = MetricsFollower(folder / "metrics.jsonl")
    is_running = True
    while is_running:
        is_running = process.poll() is None
        for row in metrics.poll():
            on_step(row)
        time.sleep(_POLL_S)
    if process.returncode not in (0, _EXIT_INTERRUPTED):
        raise SystemExit(f"penstock train ended with {process.returncode}; {folder / 'logs'} says why")
    return metrics.rows
