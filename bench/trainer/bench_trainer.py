"""The trainer's optimizer step on groups like Geometry3K's, beside padded samples and beside TRL's GRPOTrainer.

    python bench/trainer/bench_trainer.py                    # makes .venv-trl on the first call
    python bench/trainer/bench_trainer.py --subjects group_rows packed padded

Each subject trains the same two groups of eight fixed responses to one picture each, with the same model and AdamW, in
float32, in its own process. The three of ours must agree on the gradient. TRL receives its responses, so its step has
no generation in it. .venv-trl has the newest TRL of the day on which it was made; the table names its version, and
without the folder the next call makes it anew.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.support.termination import exit_on_sigterm
from bench.trainer.workload import HIDDEN, LAYERS, RESPONSES, VOCABULARY, write_model, write_workload

ROOT = Path(__file__).resolve().parents[2]

SUBJECTS = {
    "group_rows": "Penstock, group rows",
    "packed": "Penstock, packed rows (`share_prompts = false`)",
    "padded": "padded, transformers' attention",
    "trl": "TRL GRPOTrainer",
}
BARS = {"padded": 2.0, "trl": 3.0}
"""Minimum speed of group rows relative to these subjects, where group rows are measured too."""
SAME_GRADIENT = 1e-4
"""Relative difference of gradient norms that rounding explains."""
_SAME_LIBRARIES = ("torch", "torchvision", "transformers", "accelerate", "pillow", "datasets", "msgspec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one subject."""

    step_s: float
    core_s: float
    """Processor time of all threads, in seconds."""
    peak_mb: float
    """Peak resident memory, model and optimizer included."""
    grad_norm: float | None
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


def measure(subject: str, folder: Path, workload: Path, arguments: argparse.Namespace) -> Measured:
    """Run a subject in its own process."""
    common = [f"--model={folder / 'model'}", f"--workload={workload}"]
    common += [f"--steps={arguments.steps}", f"--threads={arguments.threads}"]
    if subject == "trl":
        script = ROOT / "bench" / "trainer" / "trl_step.py"
        command = [arguments.trl or trl_python(), script, *common, f"--out={folder / 'trl'}"]
    else:
        command = [sys.executable, "-m", "bench.trainer.step_process", subject, *common]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{subject} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(
        step_s=statistics.median(found["seconds"]),
        core_s=statistics.median(found["core_seconds"]),
        peak_mb=found["peak_mb"],
        grad_norm=found.get("grad_norm"),
        version=found.get("version", ""),
    )


def head_share(num_own: int, num_computed: int) -> float:
    """Return the head's share of the arithmetic of a step's linear layers."""
    per_layer = HIDDEN * (512 + 2 * 256 + 512 + 3 * 3 * HIDDEN)
    head = num_own * HIDDEN * VOCABULARY
    return head / (head + num_computed * LAYERS * per_layer)


def main() -> int:
    """Measure, print the table for docs/benchmarks.md; return 1 if gradients disagree or a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--steps", type=int, default=3, help="measured after one that is not; the median counts")
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
        prompt = 400 + 60
        share = head_share(sum(lengths), sum(lengths) + arguments.groups * prompt)
        sys.stdout.write(
            f"{platform.machine()}, {arguments.threads} threads, torch {version('torch')}; {len(lengths)} responses of "
            f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all; the head is {share:.0%} of a step\n\n"
            "| subject | s/step | core-s/step | response tokens/s | peak memory, MiB | group rows are faster by |\n"
            "|---|---|---|---|---|---|\n"
        )
        results: dict[str, Measured] = {}
        missed: list[str] = []
        for subject in (each for each in SUBJECTS if each in arguments.subjects):  # group rows first
            found = results[subject] = measure(subject, folder, workload, arguments)
            ours, bar, faster = results.get("group_rows"), BARS.get(subject), ""
            if ours is not None:
                faster = f"{found.step_s / ours.step_s:.2f}" + (f" (bar {bar:g})" if bar else "")
                if bar and found.step_s < bar * ours.step_s:
                    missed.append(subject)
            sys.stdout.write(
                f"| {f'{SUBJECTS[subject]} {found.version}'.rstrip()} | {found.step_s:.2f} | {found.core_s:.2f} "
                f"| {sum(lengths) / found.step_s:.0f} | {found.peak_mb:.0f} | {faster} |\n"
            )
            sys.stdout.flush()
    norms = {subject: found.grad_norm for subject, found in results.items() if found.grad_norm is not None}
    if norms and max(norms.values()) > min(norms.values()) * (1 + SAME_GRADIENT):
        sys.stdout.write(f"\nthe gradients differ: {norms}\n")
        return 1
    if missed:
        sys.stdout.write(f"\nbelow their bar: {', '.join(missed)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
