"""Pushes from one GPU into plain processes: the trainer's snapshot and both ends of each transport, without an engine.

    python bench/gpu/bench_plain_push.py            # on a machine with a GPU: Qwen3-VL-2B's shape, random weights
    python bench/gpu/bench_plain_push.py --cpu      # anywhere, in a minute: a tiny model, gloo, shared memory

For a copy on the GPU and for one in the host's memory, as ranks and an offloaded optimizer make it, it measures the
seconds to take it, the peak GPU memory that it takes beside the model, and the seconds to bring it to a receiver by
broadcast (NCCL) and by shared memory (a CUDA handle, or memfd), beside a raw broadcast of the same buckets and a plain
copy within the memory. With --busy matrix products are queued on the GPU all the time, as a training thread does.
Receivers write into their own parameters, as engines do, and their digests are compared after each push.

It has run on one GPU, without --busy (docs/benchmarks.md). The numbers of --cpu mean nothing.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# To NCCL each process is a separate machine, so it sees no GPU twice and goes over sockets.
os.environ.setdefault("NCCL_HOSTID", "bench-trainer")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - after the environment is set

from bench.gpu.random_model import write_model  # noqa: E402
from bench.support.raw_broadcast import raw_group  # noqa: E402
from penstock.v1 import rollout_pb2  # noqa: E402
from penstock.weights import nccl  # noqa: E402
from penstock.weights.digest import tensor_digests  # noqa: E402
from penstock.weights.manifest import MAX_BUCKET_BYTES, Manifest, chunks, specs_of  # noqa: E402
from penstock.weights.named_weights import NamedWeights  # noqa: E402
from penstock.weights.shared_memory import SharedMemoryPool  # noqa: E402
from services.rollout.engine.sglang_plugin.shards import Shard  # noqa: E402
from services.rollout.engine.sglang_plugin.transports import BroadcastTransport, SharedMemoryTransport  # noqa: E402
from services.rollout.engine.sglang_plugin.weight_loader import take_into  # noqa: E402
from services.rollout.testing.memory_sink import joined_group  # noqa: E402
from services.trainer.weight_sync.process_group import WeightProcessGroup  # noqa: E402
from services.trainer.weight_sync.snapshot import WeightSnapshot  # noqa: E402

TIMEOUT_S = 300.0


def receive(control: Connection, device: torch.device) -> None:
    """Run a receiver: create the parameters in the first message, then take each announced push, until False."""
    os.environ["NCCL_HOSTID"] = f"bench-receiver-{os.getpid()}"
    torch.set_num_threads(1)
    manifest = Manifest.from_proto(rollout_pb2.WeightManifest.FromString(control.recv()))
    held = {
        spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in manifest.tensors
    }
    shards = {name: Shard(tensor=tensor) for name, tensor in held.items()}
    groups: dict[str, Any] = {}
    while said := control.recv():
        what, message = said
        if what == "join":
            source = rollout_pb2.BroadcastSource.FromString(message)
            groups[source.group_name] = joined_group(source, timeout=datetime.timedelta(seconds=TIMEOUT_S))
            control.send(None)
            continue
        if what == "broadcast":
            transport: Any = BroadcastTransport(group_name=message, chunk_bytes=MAX_BUCKET_BYTES)
        else:
            transport = SharedMemoryTransport.accept(rollout_pb2.SharedMemorySource.FromString(message))
        take_into(shards, manifest, transport, groups)
        _synchronize(device)
        control.send(None)
        control.send(tensor_digests(held.items(), control.recv()))


@contextlib.contextmanager
def receiver(device: torch.device, manifest: Manifest) -> Iterator[Connection]:
    """Run one receiver in its own process."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=receive, args=(its, device), daemon=True)
    process.start()
    mine.send(manifest.to_proto().SerializeToString())
    try:
        yield mine
    finally:
        mine.send(False)
        process.join(20.0)
        process.kill()


class Trainer:
    """The pushing end."""

    def __init__(self, weights: dict[str, torch.Tensor], backend: str, to: Connection) -> None:
        self._weights = weights
        self._to = to
        self._pool = SharedMemoryPool()
        name = f"bench-{os.getpid()}"
        self._group = WeightProcessGroup.listen(host="127.0.0.1", name=name, world_size=2, backend=backend)
        source = rollout_pb2.BroadcastSource(
            group_name=name, master_host="127.0.0.1", master_port=self._group.port, rank_offset=1, world_size=2,
            backend=backend, chunk_bytes=MAX_BUCKET_BYTES,
        )  # fmt: skip
        to.send(("join", source.SerializeToString()))
        self._group.form(timeout_s=TIMEOUT_S)
        to.recv()

    def take(self, device: torch.device, *, is_shared: bool) -> WeightSnapshot:
        """Copy the weights to `device`."""
        return WeightSnapshot.take(
            1,
            NamedWeights.of(self._weights),
            max_bucket_bytes=MAX_BUCKET_BYTES,
            pool=self._pool if is_shared else None,
            device=device,
        )

    def broadcast(self, taken: WeightSnapshot) -> float:
        """Broadcast the snapshot; return the seconds until the receiver has it."""
        started = time.perf_counter()
        self._to.send(("broadcast", self._group.name))
        parts = (part for bucket in taken.buckets for part in chunks(bucket, MAX_BUCKET_BYTES))
        self._group.broadcast(parts, timeout_s=TIMEOUT_S)
        return self._until_equal(started, taken)

    def share(self, taken: WeightSnapshot) -> float:
        """Share the snapshot; return the seconds until the receiver has read it from this process's memory."""
        assert taken.shared_memory is not None
        started = time.perf_counter()
        self._to.send(("shared_memory", taken.shared_memory.message.SerializeToString()))
        return self._until_equal(started, taken)

    def _until_equal(self, started: float, taken: WeightSnapshot) -> float:
        self._to.recv()
        elapsed_s = time.perf_counter() - started
        self._to.send(taken.digest_kind)
        held, sent = self._to.recv(), taken.digests
        if differing := [name for name in sent if held.get(name) != sent[name]]:
            raise SystemExit(f"{len(differing)} weights arrived wrong: {differing[:3]}")
        return elapsed_s

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def measure(
    trainer: Trainer, kept_on: torch.device, computing: torch.device, rounds: int, *, is_busy: bool
) -> list[str]:
    """Return a row of the table for copies in one place."""
    found: dict[str, list[float]] = {}
    peak_bytes = 0
    with _matrix_products(computing) if is_busy else contextlib.nullcontext():
        for number in range(rounds + 1):
            for name, is_shared, send in (("broadcast", False, trainer.broadcast), ("shared", True, trainer.share)):
                before = _start_peak(computing)
                started = time.perf_counter()
                taken = trainer.take(kept_on, is_shared=is_shared)
                taken.wait()
                took_s = time.perf_counter() - started
                peak_bytes = max(peak_bytes, _peak(computing) - before)
                sent_s = send(taken)
                sys.stderr.write(f"{kept_on}, {name}, round {number}: {took_s:.3f} s to take, {sent_s:.3f} s to send\n")
                if number:  # the first round connects, and faults pages in
                    found.setdefault("take", []).append(took_s)
                    found.setdefault(name, []).append(sent_s)
                del taken
    seconds = [f"{statistics.median(found[name]):.3f}" for name in ("take", "broadcast", "shared")]
    peak = f"{peak_bytes / 2**30:.2f}" if computing.type == "cuda" else ""
    return [str(kept_on), "yes" if is_busy else "no", *seconds, peak]


@contextlib.contextmanager
def _matrix_products(device: torch.device) -> Iterator[None]:
    """Queue work on the default stream, a few products ahead of the finished ones, as a training thread does."""
    is_over = threading.Event()
    left, right = (torch.randn(4096 if device.type == "cuda" else 256, 4096, device=device) for _ in range(2))

    def work() -> None:
        while not is_over.is_set():
            for _ in range(50):
                left @ right.T
            _synchronize(device)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _copy_s(weights: dict[str, torch.Tensor], device: torch.device, rounds: int) -> float:
    """Return the seconds to copy all weights once within the memory: the lower bound of a push."""

    def copy() -> None:
        for tensor in weights.values():
            tensor.clone()
        _synchronize(device)

    return statistics.median(_seconds(copy) for _ in range(rounds))


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _raw_s(manifest: Manifest, backend: str, rounds: int) -> float:
    sizes = [sum(spec.num_bytes for spec in bucket) for bucket in manifest.buckets]
    with raw_group(1, sizes, backend) as pipes:
        found = []
        for _ in range(rounds + 1):
            for pipe in pipes:
                pipe.send(True)
            found.append(max(pipe.recv() for pipe in pipes))
    return statistics.median(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _start_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak(device: torch.device) -> int:
    """Return the peak of torch's allocator, without shared memory of the GPU, which cuMemAlloc makes outside it."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def main() -> None:
    """Measure and print a table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU, with a tiny model")
    parser.add_argument("--config", type=Path, help="config.json of a Qwen3-VL checkpoint whose shape to take")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="also with work queued on the GPU")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no GPU is seen; give --cpu for a dry run without one")
    torch.set_num_threads(1)
    os.environ.update(nccl.environment())
    backend = "gloo" if arguments.cpu else "nccl"
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", 0)
    shape = json.loads(arguments.config.read_text()) if arguments.config else None
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", is_tiny=arguments.cpu and shape is None, device=device, shape=shape)
    weights = {name: parameter.detach().to(device) for name, parameter in model.named_parameters()}
    manifest = Manifest.plan(specs_of(weights), max_bucket_bytes=MAX_BUCKET_BYTES)
    devices = [device] if device.type == "cpu" else [device, torch.device("cpu")]
    rows = []
    with receiver(device, manifest) as to:
        trainer = Trainer(weights, backend, to)
        for is_busy in (False, True) if arguments.busy else (False,):
            rows += [measure(trainer, kept_on, device, arguments.rounds, is_busy=is_busy) for kept_on in devices]
        trainer.close()
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else platform.machine()
    lines = [
        f"{name}, torch {torch.__version__}: {manifest.num_bytes / 2**30:.2f} GiB in {len(manifest.buckets)} buckets; "
        f"a plain copy takes {_copy_s(weights, device, arguments.rounds):.3f} s, a raw broadcast "
        f"{_raw_s(manifest, backend, arguments.rounds):.3f} s",
        "",
        "| copy in | GPU busy | take, s | broadcast, s | shared memory, s | GPU memory beside the model, GiB |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
