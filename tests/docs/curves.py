"""`python -m tests.docs.curves BEFORE AFTER` ends with 0 if two runs differ as CONTRIBUTING.md shows: the reward of the
second has fallen to nothing, and that of the first has not.
"""

import json
import sys
from pathlib import Path
from statistics import mean

_NUM_STEPS = 10
"""At the beginning and at the end, as in the line that `penstock train` prints."""
_NOTHING = 0.1
_NOISE = 0.06
"""Two standard deviations of the difference of two means over ten steps, whose own is up to 0.075 in such runs."""


def main(before: Path, after: Path) -> int:
    """Compare the runs in two folders."""
    (kept_from, kept), (lost_from, lost) = map(_first_and_last, (before, after))
    sys.stdout.write(f"{before}: {kept_from:.3f} -> {kept:.3f}, {after}: {lost_from:.3f} -> {lost:.3f}\n")
    return 0 if kept > kept_from - _NOISE and lost < _NOTHING < lost_from else 1


def _first_and_last(run: Path) -> tuple[float, float]:
    rewards = [json.loads(line)["reward_mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return mean(rewards[:_NUM_STEPS]), mean(rewards[-_NUM_STEPS:])


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
