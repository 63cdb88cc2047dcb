"""What `launch.backend = "ray"` costs beside the local launcher: start-up, step and end of the same short run.

    make bench-ray                          # 20 steps, twice each, in about four minutes
    make bench-ray ARGS="--rounds 5 --steps 60"

Every run is a whole `penstock train` with all its real processes, one after the other, local and Ray in turn; every
other round begins with Ray. The Ray cluster is one node on this machine without GPUs, up before the first run, so that
both place the same processes on the same cores. Core-seconds are of the whole machine, the cluster's own processes
included. Other work on the machine changes the numbers: the cores that were busy before each run are in the table.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from ray.cluster_utils import Cluster

from bench.demo.penstock_run import ROOT, running
from bench.support.cores import BusyTime
from bench.support.termination import exit_on_sigterm

_NUM_WARMUP = 3
"""Steps left out of the median: engines are new, and groups wait that were played before the first step."""
_SETTLE_S = 3.0
"""Between runs, in which the cores that are busy are counted."""
COLUMNS = (
    *("launcher", "first step after s", "median s/step", "core-s/step", "last step to exit s", "whole run s"),
    "cores busy before",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of one run."""

    first_step_s: float
    step_s: float
    step_core_s: float
    end_s: float
    whole_s: float
    cores_before: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers, as the table has them."""
        return tuple(f"{seconds:.2f}" for seconds in astuple(self))


def main() -> int:
    """Return 0 if every run ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recipe", default="tiny-cpu", help="its name, or a file; default: tiny-cpu")
    arguments = parser.parse_args()
    if arguments.steps <= _NUM_WARMUP:
        parser.error(f"--steps = {arguments.steps}; the first {_NUM_WARMUP} are not counted, so give more")
    exit_on_sigterm()
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 0, "include_dashboard": False})
    launchers = {"local": [], "ray": ["--launch.backend=ray", f"--launch.ray_address={cluster.address}"]}
    runs: dict[str, list[Run]] = {name: [] for name in launchers}
    _print_row(COLUMNS)
    _print_row(["---"] * len(COLUMNS))
    try:
        for index in range(arguments.rounds):
            for name in list(launchers)[:: -1 if index % 2 else 1]:
                run = measure([arguments.recipe, f"--trainer.num_steps={arguments.steps}", *launchers[name]])
                runs[name].append(run)
                _print_row([name, *run.cells])
    finally:
        cluster.shutdown()
    report(runs["local"], runs["ray"])
    return 0


def report(local: Sequence[Run], ray: Sequence[Run]) -> None:
    """Print the median, least and most of what each round's run on Ray took more than the local one."""
    sys.stdout.write("\nRay less local, round by round:\n\n")
    _print_row(["", "median", "least", "most", "median of local"])
    _print_row(["---"] * 5)
    for name in ("first_step_s", "step_s", "step_core_s", "end_s", "whole_s"):
        before = [getattr(run, name) for run in local]
        more = [getattr(run, name) - value for run, value in zip(ray, before, strict=True)]
        values = statistics.median(more), min(more), max(more)
        _print_row([name, *(f"{value:+.2f}" for value in values), f"{statistics.median(before):.2f}"])


def _print_row(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def measure(arguments: list[str]) -> Run:
    """Train once.

    Raises:
        CalledProcessError: the run failed.
    """
    runs = Path(tempfile.mkdtemp())
    before = BusyTime()
    time.sleep(_SETTLE_S)
    cores_before = before.core_s() / _SETTLE_S
    began = time.monotonic()
    ends: list[float] = []
    busy_s: list[float] = []
    busy = BusyTime()
    with running("train", *arguments, f"--run.dir={runs}") as process:
        while process.poll() is None:
            time.sleep(0.02)
            num_new = len(_rows(runs)) - len(ends)
            ends += [time.monotonic()] * num_new
            busy_s += [busy.core_s()] * num_new
        ended = time.monotonic()
    if process.returncode:
        sys.stderr.write(f"the run failed; its logs are in {runs}\n")
        raise subprocess.CalledProcessError(process.returncode, process.args)
    lines = _rows(runs)
    shutil.rmtree(runs)
    return Run(
        first_step_s=ends[0] - began,
        step_s=statistics.median(json.loads(line)["step_s"] for line in lines[_NUM_WARMUP:]),
        step_core_s=(busy_s[-1] - busy_s[_NUM_WARMUP - 1]) / (len(lines) - _NUM_WARMUP),
        end_s=ended - ends[-1],
        whole_s=ended - began,
        cores_before=cores_before,
    )


def _rows(runs: Path) -> list[str]:
    for metrics in runs.glob("*/metrics.jsonl"):
        return [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return []


if __name__ == "__main__":
    sys.exit(main())
