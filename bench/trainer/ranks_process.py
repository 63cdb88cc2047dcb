"""One number of ranks of `bench_ranks.py`, in its own processes: prints one line of JSON.

python -m bench.trainer.ranks_process 2 --model DIR --workload FILE --steps 3
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from bench.trainer.ranks_push_process import memory_of
from bench.trainer.workload import Workload, read_groups
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.ranks.start import open_ranks
from services.trainer.config import BackendConfig, OptimizerConfig

MICRO_BATCH_TOKENS = 4096


def main() -> None:
    """Measure steps after a first that is not counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = read_groups(arguments.model, Workload.read(arguments.workload))
    backend = open_ranks(
        {
            "model_path": arguments.model,
            "config": BackendConfig(
                device="cpu",
                micro_batch_tokens=MICRO_BATCH_TOKENS,
                optimizer=OptimizerConfig(learning_rate=1e-6),
            ),
            "algorithm": AlgorithmConfig(),
            "seed": 0,
            "temperature": 1.0,
        },
        num_ranks=arguments.ranks,
    )
    backend.load(None)
    grad_norm = take_step(backend, [groups], 1)["grad_norm"]
    seconds = []
    for step in range(arguments.steps):
        started = time.perf_counter()
        take_step(backend, [groups], 2 + step)
        seconds.append(time.perf_counter() - started)
    share = communication_share(lambda: take_step(backend, [groups], 2 + arguments.steps))
    ranks = [psutil.Process(), *psutil.Process().children()]
    found = {
        "seconds": seconds,
        "mb": [memory_of(process.pid, "VmHWM") for process in ranks],
        "grad_norm": grad_norm,
        "communication_share": share,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    backend.close()


def communication_share(step: Callable[[], object]) -> float:
    """Return the share of a step's time in which rank 0 is in a collective of gloo, waiting for others included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        step()
        duration_s = time.perf_counter() - started
    spans = [(event.time_range.start, event.time_range.end) for event in profile.events() if "gloo:" in event.name]
    busy_us, end_us = 0.0, 0.0
    for start, stop in sorted(spans):
        busy_us += max(0.0, stop - max(start, end_us))
        end_us = max(end_us, stop)
    return busy_us / 1e6 / duration_s


if __name__ == "__main__":
    main()
