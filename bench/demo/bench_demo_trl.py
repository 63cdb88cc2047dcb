"""The demo beside TRL's GRPOTrainer: the same model, problems, order, batch, sampling, optimizer, reward and machine.

    python bench/demo/bench_demo_trl.py            # both until a mean reward of 0.8; makes .venv-trl on the first call
    python bench/demo/bench_demo_trl.py --steps 20 # only the cost of a step

Penstock is the whole `penstock train recipes/tiny-cpu.toml` with all its processes; TRL is one process that alternates
between generating with transformers and training. Seconds count from the end of the first step, to exclude both starts;
a reward of 0.8 is reached when the mean over five steps reaches it.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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


def describe(name: str, steps: Sequence[Step], target: float) -> str:
    """Return one line of the table."""
    seconds = [after.ended_at - before.ended_at for before, after in itertools.pairwise(steps)]
    core_s = (steps[-1].core_s - steps[0].core_s) / len(seconds)
    end = reached_at(steps, target)
    reached = ["not reached", "-"] if end is None else [f"{end + 1}", f"{steps[end].ended_at - steps[0].ended_at:.0f}"]
    last = statistics.mean(step.reward for step in steps[-10:])
    cells = [name, str(len(steps)), f"{statistics.median(seconds):.2f}", f"{statistics.mean(seconds):.2f}"]
    return " | ".join([*cells, f"{core_s:.2f}", *reached, f"{last:.3f}"])


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


def main() -> int:
    """Run both, one after the other, and print the table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="the most of either run")
    parser.add_argument("--target", type=float, default=0.8, help="mean reward at which a run ends")
    parser.add_argument("--seed", type=int, default=0, help="of the order of problems")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch in TRL's process")
    parser.add_argument("--trl", type=Path, help="interpreter with TRL, instead of .venv-trl")
    parser.add_argument("overrides", nargs="*", help="--section.key=value for both, after a --")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: seconds count from the end of the first step; give 2 or more")
    exit_on_sigterm()
    os.chdir(ROOT)
    overrides = [f"--trainer.num_steps={arguments.steps}", f"--run.seed={arguments.seed}", *arguments.overrides]
    recipe = configuration.load(Recipe, [RECIPE], overrides)
    python = arguments.trl or trl_python()
    with tempfile.TemporaryDirectory(prefix="bench-demo-trl-") as scratch:
        folder = Path(scratch)
        task = write_task(folder, recipe, target=arguments.target, window=_WINDOW)
        trainer = recipe.trainer
        sys.stdout.write(
            f"{trainer.groups_per_step} prompts x {trainer.samples_per_group} samples, seed {arguments.seed}\n\n"
            f"| | steps | s/step, median | mean | core-s/step | steps to {arguments.target:g} | seconds to it | "
            "reward, last 10 |\n|---|---|---|---|---|---|---|---|\n"
        )
        sys.stdout.flush()
        steps = run_trl(python, task, folder, arguments.threads)
        sys.stdout.write(f"| {describe('TRL `GRPOTrainer`', steps, arguments.target)} |\n")
        sys.stdout.flush()
        steps = run_penstock(folder / "run", overrides, arguments.target)
        sys.stdout.write(f"| {describe('Penstock', steps, arguments.target)} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
