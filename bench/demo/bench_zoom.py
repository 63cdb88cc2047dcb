"""Measures what the multi-turn demo learns on pictures that training never draws, and the share of the zoom in it.

    python bench/demo/bench_zoom.py --seeds 0 1 2

For each seed: a whole `penstock train recipes/tiny-multi-turn.toml` that evaluates itself before its first step and
after its last, and then `penstock eval` of the trained policy, with every zoomed picture blank. A policy that guesses
loses nothing by that.

It exits with 1 if a seed misses a bar: the reward in training rises by 0.25, from the mean of the first ten steps to
that of the last ten; blank zooms take away half of what the held-out score gained; the share of held-out episodes that
use the tool rises; and the run, less the evaluation after its last step, takes at most 720 s: the demo has none.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.demo.penstock_run import run_to_end
from bench.support.new_folder import new_folder
from bench.support.termination import exit_on_sigterm

RECIPE = "tiny-multi-turn"
SET = "held_out"
COLUMNS = (
    "seed", "steps", "wall s", "of that, last evaluation", "reward, first 10 steps", "last 10", "gain",
    "held out, before", "after", "gain",
    "after, zoom blank", "lost by that, of the gain", "tool use, before", "after", "max dlogp, same version",
)  # fmt: skip
MIN_GAIN = 0.25
"""Of the reward in training."""
MIN_LOST = 0.5
"""Of the held-out gain, by blank zooms."""
MAX_WALL_S = 720.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One seed. Rewards are means of ten steps; scores and tool use are of held-out pictures."""

    seed: int
    num_steps: int
    wall_s: float
    """The whole run, with both evaluations."""
    last_evaluation_s: float
    first_reward: float
    last_reward: float
    score_before: float
    score_after: float
    score_blank: float
    tool_use_before: float
    tool_use_after: float

    @property
    def gain(self) -> float:
        """What the reward in training gained."""
        return self.last_reward - self.first_reward

    @property
    def lost(self) -> float | None:
        """The share of the held-out gain that blank zooms take away; None without a gain."""
        gain = self.score_after - self.score_before
        return (self.score_after - self.score_blank) / gain if gain > 0 else None

    def misses(self) -> list[str]:
        """Return the bars that it misses."""
        found = []
        if self.gain < MIN_GAIN:
            found.append(f"the reward in training gained {self.gain:.3f}, less than {MIN_GAIN}")
        if self.lost is None:
            found.append("the held-out score gained nothing that blank zooms could take away")
        elif self.lost < MIN_LOST:
            found.append(f"blank zooms took away {self.lost:.1%} of the held-out gain, less than {MIN_LOST:.0%}")
        if self.tool_use_after <= self.tool_use_before:
            found.append(f"tool use did not rise: {self.tool_use_before:.3f} before, {self.tool_use_after:.3f} after")
        if (training_s := self.wall_s - self.last_evaluation_s) > MAX_WALL_S:
            found.append(f"training took {training_s:.0f} s, more than {MAX_WALL_S:.0f}")
        return found


def main() -> int:
    """Return 0 if every seed meets the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=new_folder, help="new folder for the runs; default: one that is removed")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    exit_on_sigterm()
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    misses = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            folder = (arguments.runs or Path(scratch)) / f"seed-{seed}"
            run, blank, wall_s = play(seed, folder, arguments.overrides)
            measured, cells = measure(seed, run, blank, wall_s)
            misses += [f"seed {seed}: {each}" for each in measured.misses()]
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()
    sys.stdout.write("".join(f"MISSED: {each}\n" for each in misses))
    return 1 if misses else 0


def play(seed: int, folder: Path, overrides: list[str]) -> tuple[Path, Path, float]:
    """Train and evaluate, on the same pictures before, after and blank; return both run folders, and the seconds that
    training took."""
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
    return run, blank, wall_s


def measure(seed: int, run: Path, blank: Path, wall_s: float) -> tuple[Measurement, list[str]]:
    """Read what the two run folders hold; return it, and its line of the table."""
    rows, (before, after) = lines(run / "metrics.jsonl"), lines(run / "evaluations.jsonl")
    unseen = json.loads((blank / "evaluation.json").read_text())
    first, last, without = (each["sets"][SET] for each in (before, after, unseen))
    begun_at, ended_at = (sum(row["reward_mean"] for row in part) / len(part) for part in (rows[:10], rows[-10:]))
    same_version = [row["dlogp_max_current"] for row in rows if "dlogp_max_current" in row]
    measured = Measurement(
        seed=seed,
        num_steps=len(rows),
        wall_s=wall_s,
        last_evaluation_s=after["elapsed_s"],
        first_reward=begun_at,
        last_reward=ended_at,
        score_before=first["score"]["value"],
        score_after=last["score"]["value"],
        score_blank=without["score"]["value"],
        tool_use_before=first["metrics"]["tool_use"],
        tool_use_after=last["metrics"]["tool_use"],
    )
    cells = [
        str(seed),
        str(measured.num_steps),
        f"{wall_s:.0f}",
        f"{measured.last_evaluation_s:.0f}",
        f"{begun_at:.3f}",
        f"{ended_at:.3f}",
        f"{measured.gain:+.3f}",
        *(f"{each['score']['value']:.3f} ± {each['score']['standard_error']:.3f}" for each in (first, last)),
        f"{measured.score_after - measured.score_before:+.3f}",
        f"{measured.score_blank:.3f}",
        "-" if measured.lost is None else f"{measured.lost:.0%}",
        f"{measured.tool_use_before:.3f}",
        f"{measured.tool_use_after:.3f}",
        f"{max(same_version):.1e}" if same_version else "-",
    ]
    return measured, cells


def penstock(command: str, runs: Path, arguments: list[str], overrides: list[str]) -> Path:
    """Run a command and return the folder that it leaves in `runs`."""
    run_to_end(command, *arguments, f"--run.dir={runs}", *overrides)
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
