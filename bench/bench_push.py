"""Measures how fast weights reach the engines, beside a raw torch.distributed broadcast of the same bytes.

    python bench/bench_push.py [--gb 1.0] [--receivers 1 2] [--transports disk delta] [--rounds 9] [--no-engine]

Rounds of both take turns. Raw: plain processes, a process group, whole buckets, into preallocated memory, and nothing
else. Push: the trainer's WeightPublisher, with all its stages and digests, over gRPC. Its transport is "auto", which is
shared_memory here, because all processes are on one machine; then "broadcast", over the same gloo as raw; then others.
A whole push is from the call of `publish` to its end, "not generating" from the first pause to the last commit.
Simulated engines (services/rollout/testing) are the engine's own receiver with tensors in memory instead of a model;
the real one is SGLang with random weights in the layer shapes of Qwen3-VL-2B. The first push of each forms the group
and is not counted.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent

import torch  # noqa: E402 - after the environment is set

from bench.support.cores import StolenTime  # noqa: E402
from bench.support.raw_broadcast import broadcast_raw, raw_group  # noqa: E402
from penstock.bus.buckets.watch import watched  # noqa: E402
from penstock.bus.connection import Bus, connect  # noqa: E402
from penstock.bus.local_server import local_server  # noqa: E402
from penstock.config import BusConfig, LogConfig  # noqa: E402
from penstock.runtime.security import Security  # noqa: E402
from penstock.telemetry import log  # noqa: E402
from penstock.weights.digest import MULTILINEAR, XXH3, tensor_digests  # noqa: E402
from penstock.weights.manifest import Manifest, specs_of  # noqa: E402
from penstock.weights.named_weights import NamedWeights  # noqa: E402
from services.rollout.testing.engine_process import engine_process  # noqa: E402
from services.rollout.testing.simulated_replica import simulated_replica  # noqa: E402
from services.trainer.config import WeightSyncConfig  # noqa: E402
from services.trainer.weight_sync.publisher import WeightPublisher  # noqa: E402
from services.trainer.weight_sync.push_report import PushReport  # noqa: E402
from services.trainer.weight_sync.transports.disk import WeightFileStore  # noqa: E402

HIDDEN, MLP, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2048, 6144, 16, 8, 128
"""Sizes of Qwen3-VL-2B's language model."""
BAR = 0.9
DELTA_EVERY = 100
"""For deltas, one number in 100 changes from version to version."""
RUN = "bench-push"


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements for one kind and number of receivers."""

    what: str
    num_receivers: int
    num_bytes: int
    raw_s: list[float]
    take_s: list[float]
    """Seconds for the trainer's snapshot, while engines generate."""
    publish_s: list[float]
    """Seconds from the publication to the last engine's last answer."""
    reports: list[PushReport]


def shapes_of(num_bytes: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return as many layers as come nearest to this many bytes of bfloat16."""
    layer = {
        "self_attn.q_proj.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (MLP, HIDDEN),
        "mlp.up_proj.weight": (MLP, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {
        f"layers.{index}.{name}": (torch.bfloat16, shape)
        for index in range(num_layers(num_bytes))
        for name, shape in layer.items()
    }


def num_layers(num_bytes: int) -> int:
    """Return the number of layers of about this many bytes in all, rounded up."""
    layer = 2 * (2 * NUM_HEADS * HEAD_DIM * HIDDEN + 2 * NUM_KV_HEADS * HEAD_DIM * HIDDEN + 3 * MLP * HIDDEN)
    return max(1, -(-num_bytes // layer))


def change(version: int, tensors: dict[str, torch.Tensor], transport: str) -> None:
    """Change bytes in every tensor; with delta only a few, as after a small step."""
    for tensor in tensors.values():
        words = tensor.view(torch.int16).view(-1)
        (words[::DELTA_EVERY] if transport == "delta" else words).add_(version)


@contextlib.asynccontextmanager
async def publishing(
    bus: Bus, config: WeightSyncConfig, num_replicas: int, folder: Path | None, backend: str = "gloo"
) -> AsyncIterator[WeightPublisher]:
    """Yield a publisher that sees this many replicas."""
    ttl_s = bus.config.lease_ttl_s
    async with watched(await bus.bucket("replicas", ttl_s=ttl_s), ttl_s=ttl_s) as watch:
        publisher = WeightPublisher(
            config=config,
            host="127.0.0.1",
            replicas=watch,
            backend=backend,
            files=WeightFileStore(folder),
            security=Security.from_environment(),
        )
        async with asyncio.timeout(120):
            while publisher.num_live_replicas < num_replicas:
                await watch.changed(0.2)
        try:
            yield publisher
        finally:
            await publisher.close()


async def measure(
    what: str,
    publisher: WeightPublisher,
    tensors: dict[str, torch.Tensor],
    num_receivers: int,
    num_rounds: int,
    *,
    first_version: int = 1,
    backend: str = "gloo",
) -> Row:
    """Measure rounds of both, in turn."""
    manifest = Manifest.plan(specs_of(tensors), max_bucket_bytes=publisher.max_bucket_bytes)
    sizes = [sum(spec.num_bytes for spec in bucket) for bucket in manifest.buckets]
    raw_s: list[float] = []
    take_s: list[float] = []
    publish_s: list[float] = []
    reports: list[PushReport] = []
    with raw_group(num_receivers, sizes, backend) as pipes:
        await asyncio.to_thread(broadcast_raw, pipes)
        for version in range(first_version, first_version + num_rounds + 1):
            raw_s.append(await asyncio.to_thread(broadcast_raw, pipes))
            await asyncio.to_thread(change, version, tensors, publisher.config.transport)
            started = time.perf_counter()
            weights = await asyncio.to_thread(publisher.take, version, NamedWeights.of(tensors))
            taken = time.perf_counter()
            report = await publisher.publish(weights)
            take_s.append(taken - started)
            publish_s.append(time.perf_counter() - taken)
            if (report.num_replicas, report.num_failed) != (num_receivers, 0):
                raise SystemExit(f"push {version} reached {report.num_replicas} replicas, {report.num_failed} failed")
            reports.append(report)
    return Row(what, num_receivers, manifest.num_bytes, raw_s[1:], take_s[1:], publish_s[1:], reports[1:])


async def measure_simulated(url: str, num_receivers: int, arguments: argparse.Namespace, transport: str) -> Row:
    """Measure with simulated engines."""
    shapes = shapes_of(int(arguments.gb * 1e9))
    tensors = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in shapes.items()}
    run = f"{RUN}-{transport}-{num_receivers}"
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(BusConfig(url=url), run=run))
        await bus.ensure_streams()
        for index in range(num_receivers):
            await stack.enter_async_context(
                simulated_replica(bus, replica_id=f"simulated-{index}", shapes=shapes, audits=False)
            )
        config = WeightSyncConfig(transport=transport)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if transport == "disk" else None
        publisher = await stack.enter_async_context(publishing(bus, config, num_receivers, folder))
        return await measure(f"simulated, {transport}", publisher, tensors, num_receivers, arguments.rounds)


async def measure_engine(url: str, arguments: argparse.Namespace, transports: Sequence[str]) -> list[Row]:
    """Measure with one real SGLang."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = await asyncio.to_thread(build_model, folder / "model", int(arguments.gb * 1e9))
        async with (
            engine_process(folder / "model", url, folder, dtype="bfloat16", context_length=256, max_running=4),
            connect(BusConfig(url=url), run=folder.name) as bus,
        ):
            for transport in transports:
                first_version = 1 + len(rows) * (1 + arguments.rounds)
                async with publishing(bus, WeightSyncConfig(transport=transport), 1, None) as publisher:
                    row = await measure(
                        f"SGLang, {transport}", publisher, tensors, 1, arguments.rounds, first_version=first_version
                    )
                say(table([row]))
                rows.append(row)
    return rows


def build_model(folder: Path, num_bytes: int) -> dict[str, torch.Tensor]:
    """Write a Qwen3-VL with random weights; return them as a trainer would push them."""
    from transformers import Qwen3VLForConditionalGeneration

    from models.tiny_qwen3_vl import build_config, build_processor, build_tokenizer, save_model

    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.head_dim = HIDDEN, MLP, HEAD_DIM
    text.num_attention_heads, text.num_key_value_heads = NUM_HEADS, NUM_KV_HEADS
    text.num_hidden_layers = num_layers(num_bytes)
    text.rope_parameters["mrope_section"] = [24, 20, 20]
    vision.out_hidden_size = HIDDEN
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    save_model(model, build_processor(tokenizer), folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def digest_rate(num_bytes: int, kind: str) -> float:
    """Return GB/s of the digests that both sides compute, on this machine's cores."""
    tensors = [(str(index), torch.randn(num_bytes // 32)) for index in range(8)]
    tensor_digests(tensors, kind)
    started = time.perf_counter()
    tensor_digests(tensors, kind)
    return num_bytes / (time.perf_counter() - started) / 1e9


def table(rows: list[Row]) -> str:
    """Return the medians as Markdown."""
    lines = [
        "| receivers | GB | snapshot s | raw s | whole push s | raw / push | raw / transfer | not generating s | "
        "prepare / upload / pause / transfer / commit ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        raw_s, push_s = statistics.median(row.raw_s), statistics.median(row.publish_s)
        stages = {
            name: statistics.median(
                report.stages_s.get(name, 0.0) for report in row.reports
            )  # not all transports upload
            for name in ("prepare", "upload", "pause", "transfer", "commit")
        }
        pause_s = statistics.median(report.pause_s for report in row.reports)
        lines.append(
            f"| {row.num_receivers} {row.what} | {row.num_bytes / 1e9:.2f} | {statistics.median(row.take_s):.2f} | "
            f"{raw_s:.2f} | {push_s:.2f} | {raw_s / push_s:.2f} | {raw_s / stages['transfer']:.2f} | {pause_s:.2f} | "
            + " / ".join(f"{1e3 * value:.0f}" for value in stages.values())
            + " |"
        )
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> str:
    """Return how much of raw's bandwidth each row has: whole pushes, and for broadcasts the transfer alone."""
    lines = []
    for row in rows:
        raw_s, push_s = statistics.median(row.raw_s), statistics.median(row.publish_s)
        transfer_s = statistics.median(report.stages_s["transfer"] for report in row.reports)
        name = f"{row.num_receivers} {row.what}"
        if row.what.endswith((", auto", ", broadcast")):
            lines.append(f"{name}: whole push at least {BAR} of raw: {_verdict(raw_s / push_s)}")
        if row.what.endswith(", broadcast"):
            lines.append(f"{name}: transfer at least {BAR} of raw: {_verdict(raw_s / transfer_s)}")
    return "\n".join(lines)


def _verdict(share: float) -> str:
    return f"{'HOLDS' if share >= BAR else 'MISSED'} ({share:.2f})"


def delta_table() -> str:
    """Return the savings of a delta: AdamW steps of the tiny model on random text, a third step after two others."""
    from models.tiny_qwen3_vl import build_config, build_model, build_tokenizer
    from penstock.weights.delta import encode_block

    lines = ["| learning rate | dtype | full bytes | delta bytes | share |", "|---|---|---|---|---|"]
    config = build_config(build_tokenizer())
    for learning_rate in (1e-6, 1e-5, 3e-4):
        model = build_model(config, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        for _ in range(3):
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            ids = torch.randint(0, 300, (8, 64))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for dtype in (torch.float32, torch.bfloat16):
            pairs = [(before[name].to(dtype), after.detach().to(dtype)) for name, after in model.named_parameters()]
            full = sum(after.nbytes for _, after in pairs)
            delta = sum(len(encode_block(old, new)) for old, new in pairs)
            lines.append(f"| {learning_rate:g} | {str(dtype)[6:]} | {full:,} | {delta:,} | {delta / full:.1%} |")
    return "\n".join(lines)


def say(text: str) -> None:
    """Print at once, not when a buffer is full."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the weights, in 10^9 bytes")
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 2], help="numbers of simulated engines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--transports", nargs="*", default=["disk", "delta"], help="trainer.weight_sync.transport, beside the first two"
    )
    parser.add_argument("--no-engine", action="store_true", help="leave out the real SGLang")
    arguments = parser.parse_args()
    log.configure(LogConfig(level="warning"), service="bench")
    torch.set_num_threads(1)
    for kind in (XXH3, MULTILINEAR):
        say(f"digests, {kind}: {digest_rate(int(arguments.gb * 1e9), kind):.1f} GB/s")
    stolen = StolenTime()
    rows = await measure_all(arguments)
    say(f"\n{table(rows)}\n\n{verdicts(rows)}")
    say(f"time that the host took from all cores: {stolen.share():.1%}\n\n{delta_table()}")


async def measure_all(arguments: argparse.Namespace) -> list[Row]:
    """Return every row, after printing it at once."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with local_server(Path(folder)) as url:
            for num_receivers in arguments.receivers:
                for transport in ("auto", "broadcast"):
                    rows.append(await measure_simulated(url, num_receivers, arguments, transport))
                    say(table(rows[-1:]))
            for transport in arguments.transports:
                rows.append(await measure_simulated(url, 1, arguments, transport))
                say(table(rows[-1:]))
            if not arguments.no_engine:
                rows += await measure_engine(url, arguments, ("auto", "broadcast"))
    return rows


if __name__ == "__main__":
    asyncio.run(main())
