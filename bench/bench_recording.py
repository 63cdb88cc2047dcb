"""What it costs a step to record everything: all episodes with every token, and the spans of all processes.

    python bench/bench_recording.py                            # 20 pairs of turns of 10 steps, in about 15 minutes
    python bench/bench_recording.py --pairs 3                  # a taste, too short to tell

One run of the demo recipe records in turns: recording is switched on and off while the run goes on, and neighbouring
turns are compared. A turn has as many steps as there are from one checkpoint to the next. What a switch leaves behind,
spans that are still to be sent and read, is waited for. A switched-off run keeps its connections for spans, which then
carry nothing: they cost little and are not counted.

SGLang's schedulers record nothing, so their processor time tells what else made a turn dear: how fast the machine was,
and how much was sampled. Differences are those at equal time of the schedulers, and have their standard errors. By
these the last lines say whether recording costs at most 1% of a step, or that the run was too short to tell.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from bench.demo.penstock_run import follow, training
from bench.demo.processor_time import SCHEDULERS, core_seconds
from bench.recording.switch import Switch
from bench.recording.switched import MODULE
from bench.recording.turns import Turn, Turns, compare
from bench.support.termination import exit_on_sigterm
from services.launch.metrics import StepRow

_BAR = 0.01
"""Share of a step that recording may cost."""
_SETTLE_S = 7.0
"""Spans are sent within a second of their end, and read within five."""
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
    """Print one line for each turn, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of a turn on and a turn off")
    parser.add_argument("--steps", type=int, default=10, help="of each turn that are measured")
    parser.add_argument("--warm-up", type=int, default=10, help="steps at the beginning of the run that do not count")
    parser.add_argument("--seed", type=int, default=0, help="of the run, and of the order of the turns")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    if arguments.pairs < 3 or arguments.steps < 1:
        parser.error(f"--pairs {arguments.pairs} must be at least 3, --steps {arguments.steps} at least 1")
    exit_on_sigterm()
    settings = [
        *("--episodes.keep=all", f"--run.seed={arguments.seed}", f"--trainer.num_steps={_NO_END}"),
        *(f"--trainer.checkpoint_every={arguments.steps}", *arguments.overrides),
    ]
    with tempfile.TemporaryDirectory(prefix="recording-", ignore_cleanup_errors=True) as scratch:
        file, folder = Path(scratch) / "switch", Path(scratch) / "run"
        switch = Switch(file)
        with training(folder, settings, command=(sys.executable, "-m", MODULE, str(file))) as process:
            turns = Turns(
                switch.set,
                lambda: core_seconds(psutil.Process(process.pid)),
                num_pairs=arguments.pairs,
                num_steps=arguments.steps,
                settle_s=_SETTLE_S,
                seed=arguments.seed,
            )
            measure(process, folder, turns, warm_up=arguments.warm_up)
    _print(turns.measured)
    return 0


def _print(turns: list[Turn]) -> None:
    write = sys.stdout.write
    write("| turn | recorded | s/step | core-s/step |\n|---|---|---|---|\n")
    for number, turn in enumerate(turns):
        write(f"| {number} | {'yes' if turn.is_on else 'no'} | {turn.step_s:.3f} | {turn.total_core_s:.3f} |\n")
    write("\n| process | recorded, core-s/step | not recorded | difference | at equal time of the schedulers |\n")
    write("|---|---|---|---|---|\n")
    for kind in sorted({kind for turn in turns for kind in turn.core_s}):

        def used(turn: Turn, kind: str = kind) -> float:
            return turn.core_s.get(kind, 0.0)

        on, off = (statistics.mean(used(turn) for turn in turns if turn.is_on == wanted) for wanted in (True, False))
        found = compare(turns, used, is_relative=False)
        equal = compare(turns, used, is_relative=False, control=_schedulers) if kind != SCHEDULERS else None
        adjusted = f"{equal.mean:+.4f} ± {equal.error:.4f}" if equal else "-"
        write(f"| {kind} | {on:.3f} | {off:.3f} | {found.mean:+.4f} ± {found.error:.4f} | {adjusted} |\n")
    answers = {True: "yes", False: "no", None: "cannot be told"}
    for name, value in (
        ("processor time", lambda turn: turn.total_core_s),
        ("seconds", lambda turn: turn.step_s),
    ):
        found = compare(turns, value, is_relative=True)
        equal = compare(turns, value, is_relative=True, control=_schedulers)
        write(
            f"\n{name} of a step, recorded - not recorded, standard errors of {found.num} pairs: {found.mean:+.2%} ± "
            f"{found.error:.2%}; at equal time of the schedulers {equal.mean:+.2%} ± {equal.error:.2%}; at most "
            f"{_BAR:.0%}: {answers[equal.is_at_most(_BAR)]}\n"
        )


def _schedulers(turn: Turn) -> float:
    return turn.core_s.get(SCHEDULERS, 0.0)


if __name__ == "__main__":
    sys.exit(main())
