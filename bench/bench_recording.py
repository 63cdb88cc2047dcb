"""What it costs a step to record everything: all episodes with every token, and the spans of all processes.

    python bench/bench_recording.py                              # in about 20 minutes at 1 s a step
    python bench/bench_recording.py --pairs 3 --counted-pairs 3  # a taste, too short to tell

A run of the demo recipe records in turns: recording is switched on and off while the run goes on, and neighbouring
turns are compared. A turn has as many steps as there are from one checkpoint to the next. What a switch leaves behind,
spans that are still to be sent and read, is waited for. A switched-off run keeps its connections for spans, which then
carry nothing: they cost little and are not counted.

Two runs give two measures:

Compared, of the first run: the difference between turns on and off, which has all that recording costs. SGLang's
schedulers record nothing, so their processor time tells what else made a turn dear: how fast the machine was, and how
much was sampled. Differences are those at equal time of the schedulers.

Counted, of the second run: every process counts the processor time of its recording functions while they run, by part:
the call that makes a span, the task that encodes and sends spans with its connection, the trainer's fetching, checking
and writing of them, and the keeping of groups, in the loop and in its thread. nats-server counts nothing; its part is
the difference between turns on and off of the first run. The sum is too high by a reading of the clock for each call,
which the last line has. It cannot see what recording does to others: colder caches, waiting for the interpreter's lock,
the event loop's own work to wake a task, arguments that are computed for a span, and what the trainer's bus connection
does to receive spans. Counting takes time itself, which is why the first run does none.

Both measures have standard errors, and say that a run was too short where they do not tell whether the bar is met.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.demo.penstock_run import follow, training
from bench.demo.processor_time import core_seconds
from bench.recording.account import read_accounts
from bench.recording.report import describe
from bench.recording.switch import Switch
from bench.recording.switched import ACCOUNTS, MODULE, SWITCH
from bench.recording.turns import Turn, Turns
from bench.support.termination import exit_on_sigterm
from services.launch.metrics import StepRow

_BAR = 0.01
"""Share of a step that recording may cost."""
_SETTLE_S = 8.0
"""Spans are sent within two seconds of their end, and read within five more."""
_NO_END = 1_000_000
"""Steps of the run, which is told to end when all turns are measured."""


def measure(process: subprocess.Popen[bytes], folder: Path, turns: Turns, *, warm_up: int) -> None:
    """Follow a run until all turns are measured, and tell it to end.

    Raises:
        SystemExit: the run ended before.
    """

    def add(row: StepRow) -> None:
        if turns.is_over:  # steps that were begun before the run was told to end
            return
        if row["step"] > warm_up:
            turns.add_step(row["elapsed_s"])
        if turns.is_over:
            process.terminate()

    follow(process, folder, add)
    if not turns.is_over:
        raise SystemExit(f"penstock train ended early; {folder / 'logs'} says why")


def main() -> int:
    """Print one line for each turn, the comparison, and what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of a turn on and a turn off, to be compared")
    parser.add_argument("--counted-pairs", type=int, default=10, help="of turns of the run that counts")
    parser.add_argument("--steps", type=int, default=10, help="of each turn that are measured")
    parser.add_argument("--warm-up", type=int, default=10, help="steps at the beginning of the run that do not count")
    parser.add_argument("--seed", type=int, default=0, help="of the run, and of the order of the turns")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.counted_pairs) < 3 or arguments.steps < 1:
        parser.error("--pairs and --counted-pairs must be at least 3, and --steps at least 1")
    exit_on_sigterm()
    compared, counted = (_run(arguments, counts=counts) for counts in (False, True))
    sys.stdout.writelines(f"{line}\n" for line in describe(compared, counted, _BAR))
    sys.stdout.write(f"a reading of a thread's clock takes {1e6 * _clock_reading_s():.2f} us here\n")
    return 0


def _run(arguments: argparse.Namespace, *, counts: bool) -> list[Turn]:
    """Return the turns of a run, whose processes count what recording uses if `counts`."""
    settings = [
        *("--episodes.keep=all", f"--run.seed={arguments.seed}", f"--trainer.num_steps={_NO_END}"),
        *(f"--trainer.checkpoint_every={arguments.steps}", *arguments.overrides),
    ]
    with tempfile.TemporaryDirectory(prefix="recording-", ignore_cleanup_errors=True) as scratch:
        shared, folder = Path(scratch) / "shared", Path(scratch) / "run"
        shared.mkdir()
        if counts:
            (shared / ACCOUNTS).mkdir()
        switch = Switch(shared / SWITCH)
        with training(folder, settings, command=(sys.executable, "-m", MODULE, str(shared))) as process:
            turns = Turns(
                switch.set,
                lambda: core_seconds(psutil.Process(process.pid)),
                lambda: read_accounts(shared / ACCOUNTS),
                num_pairs=arguments.counted_pairs if counts else arguments.pairs,
                num_steps=arguments.steps,
                settle_s=_SETTLE_S,
                seed=arguments.seed,
            )
            measure(process, folder, turns, warm_up=arguments.warm_up)
    return turns.measured


def _clock_reading_s(num: int = 10_000) -> float:
    began = time.thread_time()
    for _ in range(num):
        time.thread_time_ns()
    return (time.thread_time() - began) / num


if __name__ == "__main__":
    sys.exit(main())
