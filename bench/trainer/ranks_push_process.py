"""One number of ranks and receivers of `bench_ranks_push.py`, in its own processes: prints one line of JSON.

python -m bench.trainer.ranks_push_process 2 --model DIR --receivers 1 --rounds 5
python -m bench.trainer.ranks_push_process 2 --model DIR --engine 2 --rounds 5
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.bench_push import publishing
from penstock.bus.connection import connect
from penstock.bus.local_server import local_server
from penstock.config import BusConfig, LogConfig
from penstock.telemetry import log
from services.rollout.testing.engine_process import engine_process
from services.rollout.testing.simulated_replica import simulated_replica
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import TrainBackend
from services.trainer.backend.ranks.start import open_ranks
from services.trainer.config import BackendConfig, WeightSyncConfig

_FORGET_PEAK = "5"
"""What makes Linux measure a process's VmHWM anew, written to its clear_refs."""


def main() -> None:
    """Measure rounds after a first that is not counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--model", type=Path, required=True)
    receivers = parser.add_mutually_exclusive_group(required=True)
    receivers.add_argument("--receivers", type=int, default=0, help="simulated engines")
    receivers.add_argument("--engine", type=int, default=0, help="processes of one SGLang")
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()
    log.configure(LogConfig(level="warning"), service="bench")
    torch.set_num_threads(1)
    backend = open_ranks(
        {
            "model_path": arguments.model,
            "config": BackendConfig(device="cpu", dtype="bfloat16"),
            "algorithm": AlgorithmConfig(),
            "seed": 0,
            "temperature": 1.0,
        },
        num_ranks=arguments.ranks,
    )
    backend.load(None)
    pids = [psutil.Process().pid, *(process.pid for process in psutil.Process().children())]
    found = asyncio.run(measured(backend, pids, arguments))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    backend.close()


async def measured(backend: TrainBackend, pids: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return who received, seconds of snapshots and pushes, bytes of a push, MiB of each rank before and at most."""
    specs = backend.export().specs
    num_receivers, num_rounds = arguments.receivers or 1, arguments.rounds
    what = f"SGLang, tensor_parallel {arguments.engine}" if arguments.engine else f"{num_receivers} simulated"
    take_s: list[float] = []
    push_s: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = await stack.enter_async_context(local_server(folder))
        bus = await stack.enter_async_context(connect(BusConfig(url=url), run=folder.name))
        await bus.ensure_streams()
        for number in range(arguments.receivers):
            shapes = {spec.name: (getattr(torch, spec.dtype), tuple(spec.shape)) for spec in specs}
            await stack.enter_async_context(
                simulated_replica(bus, replica_id=f"simulated-{number}", shapes=shapes, audits=False)
            )
        if arguments.engine:
            sizes = {"context_length": 256, "max_running": 4, "tensor_parallel": arguments.engine}
            await stack.enter_async_context(engine_process(arguments.model, url, folder, dtype="bfloat16", **sizes))
        publisher = await stack.enter_async_context(publishing(bus, WeightSyncConfig(), num_receivers, None))
        publisher.keeps_on_host = len(pids) > 1
        before = [memory_before(pid) for pid in pids]
        for version in range(1, num_rounds + 2):
            started = time.perf_counter()
            weights = await asyncio.to_thread(publisher.take, version, backend.export())
            taken = time.perf_counter()
            report = await publisher.publish(weights)
            if (report.num_replicas, report.num_failed) != (num_receivers, 0):
                raise SystemExit(f"push {version} reached {report.num_replicas} receivers, {report.num_failed} failed")
            take_s.append(taken - started)
            push_s.append(time.perf_counter() - taken)
        memory = list(zip(before, (memory_of(pid, "VmHWM") for pid in pids), strict=True))
    return {
        "what": what,
        "take_s": take_s[1:],
        "push_s": push_s[1:],
        "num_bytes": sum(spec.num_bytes for spec in specs),
        "mb": memory,
    }


def memory_before(pid: int) -> float:
    """Return a process's memory in MiB, and measure its peak from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text(_FORGET_PEAK)
    return memory_of(pid, "VmRSS")


def memory_of(pid: int, kind: str) -> float:
    """Return what Linux says of a process's memory, in MiB."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
