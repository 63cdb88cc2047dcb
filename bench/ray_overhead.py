"""What `launch.backend = "ray"` costs beside the local launcher: start-up, step and end of the same short run.

    make bench-ray                          # 20 steps, twice each, in about four minutes
    make bench-ray ARGS="--rounds 5"

Every run is a whole `penstock train` with all its real processes, one after the other, local and Ray in turn. The Ray
cluster is one node on this machine without GPUs, up before the first run, so that both place the same processes on the
same cores. Other work on the machine changes the numbers: the load when each run begins is in the table.
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
from pathlib import Path

from ray.cluster_utils import Cluster

from bench.demo.penstock_run import ROOT, running
from bench.support.termination import exit_on_sigterm

_NUM_WARMUP = 3
"""Steps left out of the median: engines are new, and groups wait that were played before the first step."""
COLUMNS = ("launcher", "first step after s", "median s/step", "last step to exit s", "wall s", "load at start")


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
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    try:
        for _ in range(arguments.rounds):
            for name, overrides in launchers.items():
                load = os.getloadavg()[0]
                times = measure([arguments.recipe, f"--trainer.num_steps={arguments.steps}", *overrides])
                cells = (name, *(f"{seconds:.2f}" for seconds in times), f"{load:.1f}")
                sys.stdout.write(f"| {' | '.join(cells)} |\n")
                sys.stdout.flush()
    finally:
        cluster.shutdown()
    return 0


def measure(arguments: list[str]) -> tuple[float, float, float, float]:
    """Train once; return the seconds to the end of the first step, per step, from the last step to exit, and of all.

    Raises:
        CalledProcessError: the run failed.
    """
    runs = Path(tempfile.mkdtemp())
    began = time.monotonic()
    ends: list[float] = []
    with running("train", *arguments, f"--run.dir={runs}") as process:
        while process.poll() is None:
            time.sleep(0.02)
            ends += [time.monotonic()] * (len(_rows(runs)) - len(ends))
        ended = time.monotonic()
    if process.returncode:
        sys.stderr.write(f"the run failed; its logs are in {runs}\n")
        raise subprocess.CalledProcessError(process.returncode, process.args)
    lines = _rows(runs)
    shutil.rmtree(runs)
    step_s = statistics.median(json.loads(line)["step_s"] for line in lines[_NUM_WARMUP:])
    return ends[0] - began, step_s, ended - ends[-1], ended - began


def _rows(runs: Path) -> list[str]:
    for metrics in runs.glob("*/metrics.jsonl"):
        return [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return []


if __name__ == "__main__":
    sys.exit(main())
