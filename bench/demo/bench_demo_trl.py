"""The demo beside TRL's GRPOTrainer: the same model, problems, order, batch, sampling, optimizer, reward and machine.

    python bench/demo/bench_demo_trl.py --seeds 0 1 2                # both until a mean reward of 0.8
    python bench/demo/bench_demo_trl.py --seeds 0 1 2 3 --steps 20   # only the cost of a step

Penstock is the whole `penstock train recipes/tiny-cpu.toml` with all its processes; TRL is one process that alternates
between generating with transformers and training. Seconds count from the end of the first step, to exclude both starts;
a reward of 0.8 is reached when the mean over five steps reaches it. The first call makes .venv-trl.

Each seed gives a run of either. A machine's speed may change between them, so which of them comes first alternates, and
with several seeds the last line has the ratio of their seconds per step with its standard error.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.demo.penstock_run import RECIPE, follow, training
from bench.demo.processor_time import core_seconds
from bench.demo.task import write_task
from bench.support.termination import exit_on_sigterm
from bench.trainer.bench_trainer import trl_python
from penstock import config as configuration
from services.launch.metrics import StepRow
from services.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]

PENSTOCK, TRL = "Penstock", "TRL `GRPOTrainer`"
_WINDOW = 5
"""Number of steps in the mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The end of an optimizer step."""

    reward: float
    """Mean over the batch."""
    ended_at: float
    """Seconds on the run's own clock."""
    core_s: float
    """Processor time of all processes so far, in seconds."""


def reached_at(steps: Sequence[Step], target: float) -> int | None:
    """Return the first step at which the mean reward of the last `_WINDOW` reaches `target`, as an index."""
    for index in range(_WINDOW - 1, len(steps)):
        if statistics.mean(step.reward for step in steps[index - _WINDOW + 1 : index + 1]) >= target:
            return index
    return None


def mean_step_s(steps: Sequence[Step]) -> float:
    """Return the mean seconds of a step, without the first."""
    return (steps[-1].ended_at - steps[0].ended_at) / (len(steps) - 1)


def describe(seed: int, name: str, steps: Sequence[Step], target: float) -> str:
    """Return one line of the table."""
    seconds = [after.ended_at - before.ended_at for before, after in itertools.pairwise(steps)]
    core_s = (steps[-1].core_s - steps[0].core_s) / len(seconds)
    end = reached_at(steps, target)
    reached = ["not reached", "-"] if end is None else [f"{end + 1}", f"{steps[end].ended_at - steps[0].ended_at:.0f}"]
    last = statistics.mean(step.reward for step in steps[-10:])
    cells = [str(seed), name, str(len(steps)), f"{statistics.median(seconds):.2f}", f"{mean_step_s(steps):.2f}"]
    return " | ".join([*cells, f"{core_s:.2f}", *reached, f"{last:.3f}"])


def compare(rounds: Sequence[Mapping[str, Sequence[Step]]]) -> str:
    """Return a line with the ratio of the seconds of a step, and its standard error."""
    ratios = [mean_step_s(steps[PENSTOCK]) / mean_step_s(steps[TRL]) for steps in rounds]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{PENSTOCK}'s step takes {statistics.mean(ratios):.2f} ± {error:.2f} times as long as that of {TRL}"


def run_penstock(folder: Path, overrides: Sequence[str], target: float) -> list[Step]:
    """Train until `target` or to the last step."""
    steps: list[Step] = []
    with training(folder, overrides) as process:
        launcher = psutil.Process(process.pid)

        def note(row: StepRow) -> None:
            now, used = time.monotonic(), core_seconds(launcher).total() if process.poll() is None else steps[-1].core_s
            steps.append(Step(reward=row["reward_mean"], ended_at=now, core_s=used))
            if reached_at(steps, target) == len(steps) - 1:  # only once: a second SIGINT would kill the run
                process.send_signal(signal.SIGINT)

        with contextlib.suppress(psutil.NoSuchProcess):  # it may end during the measurement
            follow(process, folder, note)
    return steps


def run_trl(python: Path, task: Path, folder: Path, threads: int) -> list[Step]:
    """Train until the task's target or to its last step.

    Raises:
        SystemExit: TRL failed.
    """
    script = ROOT / "bench" / "demo" / "trl_grpo.py"
    command = [python, script, "--task", task, "--out", folder / "out", "--threads", threads]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
    errors = folder / "trl.log"
    with errors.open("w") as log:
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log)
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{errors.read_text()[-3000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"step"')]  # TRL prints more
    steps, core_s = [], 0.0
    for row in rows:
        core_s += row["core_s"]
        steps.append(Step(reward=row["reward_mean"], ended_at=row["ended_at"], core_s=core_s))
    return steps


def run_both(
    folder: Path, arguments: argparse.Namespace, python: Path, *, seed: int, order: Sequence[str]
) -> dict[str, list[Step]]:
    """Run both in this order, and print a line of the table for each."""
    overrides = [f"--trainer.num_steps={arguments.steps}", f"--run.seed={seed}", *arguments.overrides]
    task = write_task(folder, configuration.load(Recipe, [RECIPE], overrides), target=arguments.target, window=_WINDOW)
    runs = {
        TRL: lambda: run_trl(python, task, folder, arguments.threads),
        PENSTOCK: lambda: run_penstock(folder / "run", overrides, arguments.target),
    }
    steps = {}
    for name in order:
        steps[name] = runs[name]()
        sys.stdout.write(f"| {describe(seed, name, steps[name], arguments.target)} |\n")
        sys.stdout.flush()
    return steps


def main() -> int:
    """Print the table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="the most of either run")
    parser.add_argument("--target", type=float, default=0.8, help="mean reward at which a run ends")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of the order of problems; a run of either each"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch in TRL's process")
    parser.add_argument("--trl", type=Path, help="interpreter with TRL, instead of .venv-trl")
    parser.add_argument("overrides", nargs="*", help="--section.key=value for both, after a --")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: seconds count from the end of the first step; give 2 or more")
    exit_on_sigterm()
    os.chdir(ROOT)
    trainer = configuration.load(Recipe, [RECIPE], arguments.overrides).trainer
    python = arguments.trl or trl_python()
    sys.stdout.write(
        f"{trainer.groups_per_step} prompts x {trainer.samples_per_group} samples\n\n"
        f"| seed | | steps | s/step, median | mean | core-s/step | steps to {arguments.target:g} | seconds to it | "
        "reward, last 10 |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    sys.stdout.flush()
    rounds = []
    for seed, order in zip(arguments.seeds, itertools.cycle([(TRL, PENSTOCK), (PENSTOCK, TRL)])):
        with tempfile.TemporaryDirectory(prefix="bench-demo-trl-") as scratch:
            rounds.append(run_both(Path(scratch), arguments, python, seed=seed, order=order))
    if len(rounds) > 1:
        sys.stdout.write(f"\n{compare(rounds)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
