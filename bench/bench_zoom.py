"""Measures what the multi-turn demo learns on pictures that training never draws, and the share of the zoom in it.

    python bench/bench_zoom.py --seeds 0 1 2

For each seed: a whole `penstock train recipes/tiny-multi-turn.toml` that evaluates itself before its first step and
after its last, and then `penstock eval` of the trained policy, with every zoomed picture blank. A policy that guesses
loses nothing by that.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "tiny-multi-turn"
SET = "held_out"
COLUMNS = (
    "seed", "steps", "wall s", "reward, first 10 steps", "last 10", "gain", "held out, before", "after", "gain",
    "after, zoom blank", "lost by that, of the gain", "tool use, before", "after", "max dlogp, same version",
)  # fmt: skip


def main() -> int:
    """Return 0 if every run ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="where to keep the run folders; default: a folder that is removed")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            values = measure(seed, (arguments.runs or Path(scratch)) / f"seed-{seed}", arguments.overrides)
            sys.stdout.write(f"| {' | '.join(values)} |\n")
            sys.stdout.flush()
    return 0


def measure(seed: int, folder: Path, overrides: list[str]) -> list[str]:
    """Train and evaluate; return a line of the table. Pictures are the same before, after and blank."""
    begun = time.monotonic()
    evaluations = ["--evaluation.at_start=true", "--evaluation.at_end=true"]
    run = penstock("train", folder / "train", [RECIPE], [f"--run.seed={seed}", *evaluations, *overrides])
    wall_s = time.monotonic() - begun
    blank = penstock(
        "eval",
        folder / "blank",
        [RECIPE, f"--model={run}"],
        [f"--run.seed={seed}", "--worker.environments.geo3k_zoom.args.blank=true", *overrides],
    )
    rows, (before, after) = lines(run / "metrics.jsonl"), lines(run / "evaluations.jsonl")
    unseen = json.loads((blank / "evaluation.json").read_text())
    first, last, without = (each["sets"][SET] for each in (before, after, unseen))
    gain = last["score"]["value"] - first["score"]["value"]
    lost = last["score"]["value"] - without["score"]["value"]
    begun_at, ended_at = (sum(row["reward_mean"] for row in part) / len(part) for part in (rows[:10], rows[-10:]))
    same_version = [row["dlogp_max_current"] for row in rows if "dlogp_max_current" in row]
    return [
        str(seed),
        str(len(rows)),
        f"{wall_s:.0f}",
        f"{begun_at:.3f}",
        f"{ended_at:.3f}",
        f"{ended_at - begun_at:+.3f}",
        *(f"{each['score']['value']:.3f} ± {each['score']['standard_error']:.3f}" for each in (first, last)),
        f"{gain:+.3f}",
        f"{without['score']['value']:.3f}",
        f"{lost / gain:.0%}",
        *(f"{each['metrics']['tool_use']:.3f}" for each in (first, last)),
        f"{max(same_version):.1e}" if same_version else "-",
    ]


def penstock(command: str, runs: Path, arguments: list[str], overrides: list[str]) -> Path:
    """Run a command and return the folder that it leaves in `runs`."""
    called = [sys.executable, "-m", "services.cli", command, *arguments, f"--run.dir={runs}", *overrides]
    subprocess.run(called, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
