"""Run recipes for GPUs on this machine, cut to size by recipes/cut-to-size.toml, and check what they did.

python -m tools.run_recipes --rows FOLDER                       all of them
python -m tools.run_recipes --rows FOLDER rlinf-geo3k-grpo      some

FOLDER holds train.parquet and test.parquet of Geometry3K, in any form of docs/training/data.md; without it they are
downloaded from the Hugging Face Hub. The model is a small one of the same class with random weights. Of each run: every
step is there and has a gradient, the weights differ after each, the evaluations are those that the recipe asks for, and
what judges the policy told its samples apart. Prints a table; the exit status is 1 if a check failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from penstock import shipped

COMMANDS: Final[Mapping[str, str]] = {
    "slime-geo3k-grpo": "train",
    "qwen3-vl-geo3k-multi-turn": "train",
    "rlinf-geo3k-grpo": "train",
    "slime-geo3k-sft": "sft",
}
"""The recipes for GPUs, and the command that runs each."""

OVERLAY: Final = "cut-to-size"
NUM_STEPS: Final = 5
TIMEOUT_S: Final = 1800.0

_ROOT = Path(__file__).parents[1]
_ON_THE_HUB = (
    "--data.path=hiyouga/geometry3k",
    "--data.split=train",
    "--evaluation.sets.test.path=hiyouga/geometry3k",
    "--evaluation.sets.test.split=test",
)
_EVALUATIONS = {"train": ("evaluations.jsonl", [0, NUM_STEPS]), "sft": ("validation.jsonl", [0, 2, 4, NUM_STEPS])}
"""Where they are, and the steps that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run left behind."""

    recipe: str
    exit_code: int
    wall_s: float
    steps: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    changed: Sequence[float] = ()
    """Share of the weights that each step changed."""
    faults: list[str] = field(default_factory=list)


def overrides(*, model: Path, rows: Path | None) -> list[str]:
    """The settings that say where model and rows are."""
    paths: Sequence[str] = _ON_THE_HUB
    if rows is not None:
        paths = (f"--data.path={rows / 'train.parquet'}", f"--evaluation.sets.test.path={rows / 'test.parquet'}")
    return [f"--model.path={model}", *paths]


def main() -> int:
    """Return 0 if every recipe did what it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(COMMANDS), metavar="RECIPE", help=", ".join(COMMANDS))
    parser.add_argument("--rows", type=Path, help="folder with train.parquet and test.parquet; default: from the Hub")
    parser.add_argument("--runs", type=Path, help="where to keep the run folders; default: a folder that is removed")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.recipes if name not in COMMANDS]:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(COMMANDS)}")
    with tempfile.TemporaryDirectory() as scratch:
        model = _random_model(Path(scratch) / "model")
        given = overrides(model=model, rows=arguments.rows and arguments.rows.resolve())
        runs = (arguments.runs or Path(scratch) / "runs").resolve()
        done = [_run(name, model, [*given, f"--run.dir={runs / name}"]) for name in arguments.recipes]
    _tell(done)
    return int(any(ran.faults for ran in done))


def _random_model(folder: Path) -> Path:
    _call("models.tiny_qwen3_vl", "--out", str(folder), "--seed", "0", check=True)
    return folder


def _run(recipe: str, model: Path, given: Sequence[str]) -> Ran:
    command = COMMANDS[recipe]
    files = [str(shipped.named_recipe(name)) for name in (recipe, OVERLAY)]
    begun = time.monotonic()
    exit_code = _call("services.cli", command, *files, *given)
    wall_s = time.monotonic() - begun
    folders = sorted(Path(given[-1].partition("=")[2]).glob(f"{recipe}-*"))
    if not folders:
        return Ran(recipe=recipe, exit_code=exit_code, wall_s=wall_s, faults=[f"no run folder, exit code {exit_code}"])
    folder = folders[-1]
    file, _ = _EVALUATIONS[command]
    ran = Ran(
        recipe=recipe,
        exit_code=exit_code,
        wall_s=wall_s,
        steps=list(_lines(folder / "metrics.jsonl")),
        evaluations=list(_lines(folder / file)),
        changed=[_changed(*pair) for pair in pairwise([model, *_checkpoints(folder)])],
    )
    ran.faults.extend(find_faults(ran))
    return ran


def find_faults(ran: Ran) -> Iterator[str]:
    """Say what of a run is not as it must be."""
    _, evaluated = _EVALUATIONS[COMMANDS[ran.recipe]]
    if ran.exit_code:
        yield f"exit code {ran.exit_code}"
    if (steps := [row["step"] for row in ran.steps]) != list(range(1, NUM_STEPS + 1)):
        yield f"steps {steps}, not 1 to {NUM_STEPS}"
    for row in ran.steps:
        if not row["grad_norm"] > 0 or row["skipped"]:
            yield f"step {row['step']} has gradient norm {row['grad_norm']:g}"
        if row.get("reward_std", 1.0) <= 0:
            yield f"step {row['step']} has equal rewards"
    if len(ran.changed) != NUM_STEPS:
        yield f"{len(ran.changed)} checkpoints, not {NUM_STEPS}"
    for step, share in enumerate(ran.changed, 1):
        if share == 0:
            yield f"step {step} changed no weight"
    if (found := [row["step"] for row in ran.evaluations]) != evaluated:
        yield f"evaluations of steps {found}, not {evaluated}"


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path / "model" for path in (folder / "checkpoints").glob("step-*"))


def _changed(before: Path, after: Path) -> float:
    """Return the share of weights that differ."""
    old, new = _weights(before), _weights(after)
    if old.keys() != new.keys():
        raise ValueError(f"{before} and {after} have parameters of other names")
    num_different = sum(int((old[name] != new[name]).sum()) for name in old)
    return num_different / sum(int(each.size) for each in old.values())


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def _call(module: str, *arguments: str, check: bool = False) -> int:
    """Run a module to its end; its output is shown on standard error."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, env=environment, stdout=sys.stderr, timeout=TIMEOUT_S, check=check)
    return done.returncode


def _tell(done: Sequence[Ran]) -> None:
    """Write a row for each recipe, then what is wrong."""
    rows = [("recipe", "steps", "grad_norm", "reward or loss", "weights changed", "evaluations", "seconds", "")]
    for ran in done:
        norms = " ".join(f"{row['grad_norm']:.2g}" for row in ran.steps)
        learned = " ".join(f"{row.get('reward_mean', row.get('loss')):.3f}" for row in ran.steps)
        changed = " ".join(f"{share:.0%}" for share in ran.changed)
        evaluated = ", ".join(f"{row['step']}: {_result(row):.3f}" for row in ran.evaluations)
        verdict = "FAILED" if ran.faults else "ok"
        rows.append((ran.recipe, str(len(ran.steps)), norms, learned, changed, evaluated, f"{ran.wall_s:.0f}", verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    for ran in done:
        for fault in ran.faults:
            sys.stdout.write(f"{ran.recipe}: {fault}\n")


def _result(row: Mapping[str, Any]) -> float:
    """The test set's score, or its loss."""
    return float(row["validation_loss"] if "validation_loss" in row else row["sets"]["test"]["score"]["value"])


if __name__ == "__main__":
    sys.exit(main())
