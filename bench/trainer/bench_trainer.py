"""The trainer's optimizer step on groups like Geometry3K's, beside padded samples and beside TRL's GRPOTrainer.

    python bench/trainer/bench_trainer.py                    # makes .venv-trl on the first call
    python bench/trainer/bench_trainer.py --subjects group_rows packed padded

Each subject trains the same two groups of eight fixed responses to one picture each, with the same model and AdamW, in
float32, in its own process. The three of ours must agree on the gradient. TRL receives its responses, so its step has
no generation in it. .venv-trl has the newest TRL of the day on which it was made; the table names its version, and
without the folder the next call makes it anew.

The subjects take their steps in turn, so that a machine whose speed changes changes all: in every round each takes one
step while the others wait, in random order. A ratio compares two steps of one round.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.support.termination import exit_on_sigterm
from bench.trainer.workload import HIDDEN, LAYERS, RESPONSES, VOCABULARY, write_model, write_workload
from penstock.runtime.children.parent_death import dying_with_parent

ROOT = Path(__file__).resolve().parents[2]

SUBJECTS = {
    "group_rows": "Penstock, group rows",
    "packed": "Penstock, packed rows (`share_prompts = false`)",
    "padded": "padded, transformers' attention",
    "trl": "TRL GRPOTrainer",
}
BARS = {"padded": 2.0, "trl": 3.0}
"""Minimum speed of group rows relative to these subjects in the median round, where group rows are measured too."""
SAME_GRADIENT = 1e-4
"""Relative difference of gradient norms that rounding explains."""
_SAME_LIBRARIES = ("torch", "torchvision", "transformers", "accelerate", "pillow", "datasets", "msgspec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Measurements of one step of a subject."""

    seconds: float
    core_seconds: float
    """Processor time of all threads."""
    peak_mb: float
    """Peak resident memory up to the step's end, model and optimizer included."""
    grad_norm: float | None = None
    version: str = ""
    """Of a library whose versions differ from call to call."""


def trl_python() -> Path:
    """Return the interpreter of a virtual environment with TRL; create it if there is none.

    Shared libraries have Penstock's versions, so that only the trainers differ.
    """
    folder = ROOT / ".venv-trl"
    python = folder / "bin" / "python"
    same = [f"{package}=={version(package)}" for package in _SAME_LIBRARIES]
    installed = folder / ".installed"
    if not installed.exists() or installed.read_text() != "\n".join(same):
        uv = os.environ.get("UV", str(ROOT / ".uv" / "bin" / "uv"))
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "trl", *same], check=True)
        installed.write_text("\n".join(same))
    return python


def command(subject: str, folder: Path, workload: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a subject's process."""
    common = [f"--model={folder / 'model'}", f"--workload={workload}", f"--threads={arguments.threads}"]
    if subject == "trl":
        python = str(arguments.trl or trl_python())
        return [python, "-m", "bench.trainer.trl_step", *common, f"--out={folder / 'trl'}"]
    return [sys.executable, "-m", "bench.trainer.step_process", subject, *common]


@contextlib.contextmanager
def taking_turns(
    subject: str, folder: Path, workload: Path, arguments: argparse.Namespace
) -> Iterator[Callable[[], Step]]:
    """Start a subject's process, yield a function that has it take a step, and end it with the context."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    errors = folder / f"{subject}.stderr"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command(subject, folder, workload, arguments),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=ROOT,
            env=environment,
            preexec_fn=dying_with_parent(),
        ) as process,
    ):

        def step() -> Step:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and so does not answer
                process.stdin.write(b"\n")
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"{subject} ended with {process.wait()}:\n{errors.read_text()[-3000:]}")
            return Step(**json.loads(answer))

        try:
            yield step
        finally:
            process.kill()


def measure(folder: Path, workload: Path, arguments: argparse.Namespace) -> dict[str, list[Step]]:
    """Return the steps of each subject: a first one that warms it up, and one of every round."""
    with contextlib.ExitStack() as processes:
        take, steps = {}, {}
        for subject in (each for each in SUBJECTS if each in arguments.subjects):  # as the table has them
            take[subject] = processes.enter_context(taking_turns(subject, folder, workload, arguments))
            steps[subject] = [take[subject]()]
        for number in range(1, arguments.rounds + 1):
            for subject in random.sample(list(take), len(take)):
                steps[subject].append(take[subject]())
            seconds = ", ".join(f"{subject} {taken[-1].seconds:.2f} s" for subject, taken in steps.items())
            sys.stderr.write(f"round {number} of {arguments.rounds}: {seconds}\n")
    return steps


def head_share(num_own: int, num_computed: int) -> float:
    """Return the head's share of the arithmetic of a step's linear layers."""
    per_layer = HIDDEN * (512 + 2 * 256 + 512 + 3 * 3 * HIDDEN)
    head = num_own * HIDDEN * VOCABULARY
    return head / (head + num_computed * LAYERS * per_layer)


def main() -> int:
    """Measure, print the table for docs/benchmarks.md; return 1 if gradients disagree or a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5, help="measured after one that is not; the medians count")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--groups", type=int, default=len(RESPONSES), help="of the batch; fewer for a short run")
    parser.add_argument("--trl", type=Path, help="interpreter with TRL, instead of .venv-trl")
    arguments = parser.parse_args()
    exit_on_sigterm()
    lengths = [length for group in RESPONSES[: arguments.groups] for length in group]
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as name:
        folder = Path(name)
        write_model(folder / "model")
        workload = write_workload(folder, num_groups=arguments.groups)
        steps = measure(folder, workload, arguments)
    prompt = 400 + 60
    share = head_share(sum(lengths), sum(lengths) + arguments.groups * prompt)
    sys.stdout.write(
        f"{platform.machine()}, {arguments.threads} threads, torch {version('torch')}; {len(lengths)} responses of "
        f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all; the head is {share:.0%} of a step\n\n"
        "| subject | s/step | core-s/step | response tokens/s | peak memory, MiB "
        "| group rows are faster by (least to most) |\n"
        "|---|---|---|---|---|---|\n"
    )
    missed: list[str] = []
    for subject, (warm_up, *taken) in steps.items():
        step_s = statistics.median(step.seconds for step in taken)
        core_s = statistics.median(step.core_seconds for step in taken)
        faster = ""
        if subject != "group_rows" and "group_rows" in steps:
            pairs = zip(taken, steps["group_rows"][1:], strict=True)
            ratios = [step.seconds / ours.seconds for step, ours in pairs]
            bar, ratio = BARS.get(subject), statistics.median(ratios)
            faster = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" + (f", bar {bar:g}" if bar else "")
            if bar and ratio < bar:
                missed.append(subject)
        sys.stdout.write(
            f"| {f'{SUBJECTS[subject]} {warm_up.version}'.rstrip()} | {step_s:.2f} | {core_s:.2f} "
            f"| {sum(lengths) / step_s:.0f} | {taken[-1].peak_mb:.0f} | {faster} |\n"
        )
    norms = {subject: taken[0].grad_norm for subject, taken in steps.items() if taken[0].grad_norm is not None}
    if norms and max(norms.values()) > min(norms.values()) * (1 + SAME_GRADIENT):
        sys.stdout.write(f"\nthe gradients differ: {norms}\n")
        return 1
    if missed:
        sys.stdout.write(f"\nbelow their bar: {', '.join(missed)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
