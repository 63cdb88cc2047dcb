"""Pushes and generation on one GPU: our own engine processes and push code, beside a raw broadcast of the same bytes.

    python bench/gpu/bench_gpu.py            # on a machine with a GPU: Qwen3-VL-2B's shape, random weights, NCCL
    python bench/gpu/bench_gpu.py --cpu      # anywhere, in a minute: a tiny model, gloo, shared memory

For each transport in turn it measures the stages of pushes to an idle engine, with a raw broadcast between them; then
the effect on requests that run while weights change: the longest wait between two chunks of tokens, and tokens per
second with and without. THE CUDA PARTS HAVE NOT RUN YET; what ran is --cpu.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# To NCCL every process is a separate machine, like those of the raw broadcast: both then go over sockets.
os.environ.setdefault("NCCL_HOSTID", "bench-trainer")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - after the environment is set

from bench.bench_push import Row, measure, publishing, say, table  # noqa: E402
from bench.gpu.random_model import write_model  # noqa: E402
from penstock.bus.connection import connect  # noqa: E402
from penstock.bus.local_server import local_server  # noqa: E402
from penstock.config import BusConfig, LogConfig  # noqa: E402
from penstock.telemetry import log  # noqa: E402
from penstock.v1 import generate_pb2  # noqa: E402
from penstock.weights import nccl  # noqa: E402
from penstock.weights.named_weights import NamedWeights  # noqa: E402
from services.rollout.testing.engine_process import EngineProcess, engine_process  # noqa: E402
from services.trainer.config import WeightSyncConfig  # noqa: E402
from services.trainer.weight_sync.publisher import WeightPublisher  # noqa: E402

CHUNK_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Results of requests that ran at the same time."""

    tokens_per_s: float
    longest_gap_s: float
    """Median over the requests of each one's longest wait between two chunks."""
    num_two_spans: int
    """Number of requests in which weights changed."""


def build_model(folder: Path, arguments: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Write a Qwen3-VL with random weights; return them on the device, as a trainer would push them."""
    model = write_model(
        folder,
        is_tiny=arguments.cpu and not arguments.config,
        device=device,
        shape=json.loads(arguments.config.read_text()) if arguments.config else None,
    )
    return {name: parameter.detach().to(device) for name, parameter in model.named_parameters()}


async def fly(engine: EngineProcess, arguments: argparse.Namespace, work: Any = None) -> Flight:
    """Play requests, and do `work` in the middle of them."""
    rng = random.Random(0)
    requests = [
        generate_pb2.GenerateRequest(
            input_ids=[rng.randrange(256) for _ in range(arguments.prompt_tokens)],
            sampling=generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=arguments.new_tokens),
            chunk_tokens=CHUNK_TOKENS,
        )
        for _ in range(arguments.in_flight)
    ]
    begun = asyncio.Event()

    async def play(request: generate_pb2.GenerateRequest) -> tuple[int, float, int]:
        num_tokens, longest_s, versions = 0, 0.0, set()
        last = time.monotonic()
        async for chunk in engine.generation.GenerateStream(request, timeout=600):
            now = time.monotonic()
            if num_tokens:
                longest_s = max(longest_s, now - last)
            last = now
            num_tokens += len(chunk.output_ids)
            versions |= {span.policy_version for span in chunk.version_spans}
            begun.set()
        return num_tokens, longest_s, len(versions)

    started = time.monotonic()
    calls = [asyncio.ensure_future(play(request)) for request in requests]
    if work is not None:
        await begun.wait()
        await work()
    played = await asyncio.gather(*calls)
    return Flight(
        tokens_per_s=sum(num for num, _, _ in played) / (time.monotonic() - started),
        longest_gap_s=statistics.median(longest_s for _, longest_s, _ in played),
        num_two_spans=sum(num_versions > 1 for _, _, num_versions in played),
    )


async def measure_transport(
    transport: str, url: str, folder: Path, engine: EngineProcess, tensors: dict[str, torch.Tensor], first_version: int,
    arguments: argparse.Namespace,
) -> tuple[Row, Flight]:  # fmt: skip
    """Measure pushes to an idle engine, then one into running requests."""
    backend = "gloo" if arguments.cpu else "nccl"
    config = WeightSyncConfig(transport=transport, mode=arguments.mode)
    async with (
        connect(BusConfig(url=url), run=folder.name) as bus,
        publishing(bus, config, 1, None, backend) as publisher,
    ):
        row = await measure(
            f"SGLang, {transport}",
            publisher,
            tensors,
            1,
            arguments.rounds,
            first_version=first_version,
            backend=backend,
        )
        version = first_version + arguments.rounds + 1
        flight = await fly(engine, arguments, lambda: push_once(publisher, tensors, version))
    return row, flight


async def push_once(publisher: WeightPublisher, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Push the same weights under another number."""
    weights = await asyncio.to_thread(publisher.take, version, NamedWeights.of(tensors))
    report = await publisher.publish(weights)
    if (report.num_replicas, report.num_failed) != (1, 0):
        raise SystemExit(f"the push to the running engine failed: {report}")


def describe_machine(arguments: argparse.Namespace) -> str:
    """Return the machine's description, which qualifies the numbers."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "sglang", "transformers"))
    if arguments.cpu:
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, no GPU; {versions}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {nccl}; {versions}"


def flight_table(alone: Flight, flights: Mapping[str, Flight], arguments: argparse.Namespace) -> str:
    """Return the flights as Markdown."""
    lines = [
        f"| {arguments.in_flight} requests of {arguments.prompt_tokens} + {arguments.new_tokens} tokens | tokens/s | "
        "longest wait between chunks, median, s | with both versions |",
        "|---|---|---|---|",
    ]
    for name, flight in {"no push": alone, **flights}.items():
        lines.append(f"| {name} | {flight.tokens_per_s:.0f} | {flight.longest_gap_s:.2f} | {flight.num_two_spans} |")
    return "\n".join(lines)


async def main() -> None:
    """Measure and print tables for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU, with a tiny model")
    parser.add_argument("--config", type=Path, help="config.json of a Qwen3-VL checkpoint whose shape to take")
    parser.add_argument(
        "--transports", nargs="*", default=["broadcast", "shared_memory"], help="trainer.weight_sync.transport"
    )
    parser.add_argument("--mode", default="retract", help="trainer.weight_sync.mode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=0, help="requests at a time; 0: 64, with --cpu 8")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=0, help="of each; 0: 1024, with --cpu 200")
    arguments = parser.parse_args()
    arguments.in_flight = arguments.in_flight or (8 if arguments.cpu else 64)
    arguments.new_tokens = arguments.new_tokens or (200 if arguments.cpu else 1024)
    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no GPU is seen; give --cpu for a dry run without one")
    log.configure(LogConfig(level="warning"), service="bench")
    torch.set_num_threads(1)
    if not arguments.cpu:
        os.environ.update(nccl.environment())
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", 0)
    rows: list[Row] = []
    flights: dict[str, Flight] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = await stack.enter_async_context(local_server(folder / "nats"))
        tensors = await asyncio.to_thread(build_model, folder / "model", arguments, device)
        settings: dict[str, object] = {
            "dtype": "float32" if arguments.cpu and not arguments.config else "bfloat16",
            "context_length": arguments.prompt_tokens + arguments.new_tokens + 64,
            "max_running": arguments.in_flight,
            "gpu_memory_fraction": 0.3,
        }
        engine = await stack.enter_async_context(
            engine_process(folder / "model", url, folder, environment={"NCCL_HOSTID": "bench-engine"}, **settings)
        )
        await fly(engine, arguments)  # compiles and captures at first use
        alone = await fly(engine, arguments)
        for index, transport in enumerate(arguments.transports):
            first_version = 1 + index * (arguments.rounds + 2)
            row, flights[transport] = await measure_transport(
                transport, url, folder, engine, tensors, first_version, arguments
            )
            rows.append(row)
            say(table(rows[-1:]))
    say(f"\n{describe_machine(arguments)}\n\n{table(rows)}\n\n{flight_table(alone, flights, arguments)}")


if __name__ == "__main__":
    asyncio.run(main())
