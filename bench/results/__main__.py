"""Makes docs/results.md and its plots: runs the incomplete experiments, then writes the page.

python -m bench.results                          # all runs, in runs/results; stop and continue as often as you like
python -m bench.results --only demo-seed-0 sft   # some of them; the page is written once all are complete
python -m bench.results --steps 5                # a short try, in runs/results-5-steps, page included
"""

import argparse
import os
import sys
from pathlib import Path

from bench.results.experiments import EXPERIMENTS, ROOT, by_name
from bench.results.page import write_page
from bench.results.reading import read_run
from bench.results.running import is_complete, run


def main() -> int:
    """Return 0 if the requested runs are complete; else the exit code of the incomplete run."""
    arguments = _parse()
    os.chdir(ROOT)
    runs = Path("runs") / ("results" if arguments.steps is None else f"results-{arguments.steps}-steps")
    runs.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        if is_complete(runs / name):
            continue
        if code := run(by_name(name), runs, shortened_to=arguments.steps):
            sys.stdout.write(f"{name} ended with {code}; the same command runs or continues it\n")
            return code
    if missing := [each.name for each in EXPERIMENTS if not is_complete(runs / each.name)]:
        sys.stdout.write(f"no page yet: {', '.join(missing)} must be run too\n")
        return 0
    folder = Path("docs") if arguments.steps is None else runs
    (folder / "images").mkdir(exist_ok=True)
    write_page(
        {each.name: read_run(runs / each.name) for each in EXPERIMENTS}, folder / "results.md", folder / "images"
    )
    sys.stdout.write(f"{folder / 'results.md'}\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in EXPERIMENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--steps", type=int, help="optimizer steps of each run, instead of its recipe's")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: give 1 or more")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
