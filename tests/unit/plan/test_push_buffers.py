"""What a push takes of GPUs, against what an engine allocates as it receives one and compares digests, and a trainer
as it sends one."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from penstock.weights.manifest import MAX_BUCKET_BYTES, Manifest, TensorSpec
from services.plan.live_bytes import LiveBytes
from services.plan.model_shape import ModelShape
from services.plan.push_buffers import PARTS_IN_FLIGHT, push_bytes
from services.rollout.engine.sglang_plugin.digests import GatherMemory
from services.rollout.engine.sglang_plugin.shards import Cut, Section, Shard
from services.rollout.engine.sglang_plugin.transports.broadcast import BroadcastTransport
from services.rollout.engine.sglang_plugin.transports.destination import Destination
from services.trainer.weight_sync.process_group import WeightProcessGroup
from tests.support.trainer.families import random_qwen3

CPU = torch.device("cpu")


def shape_of(folder: Path, vocab_size: int, intermediate_size: int = 128) -> ModelShape:
    """Of a Qwen3 whose embedding, head and MLPs have rows of 64 numbers."""
    config = random_qwen3().config
    config.vocab_size, config.intermediate_size = vocab_size, intermediate_size
    config.save_pretrained(folder)
    return ModelShape.read(folder)


def received_bytes(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes at a time that an engine allocates for a broadcast to SGLang's own loader."""
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=(size,)) for name, size in shape.sizes]
    manifest = Manifest.plan(specs, max_bucket_bytes=MAX_BUCKET_BYTES)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: Mock())  # one that keeps no argument
    transport = BroadcastTransport(group_name="push", chunk_bytes=MAX_BUCKET_BYTES)
    live = LiveBytes()
    with live:
        for _name, _tensor in transport.arrivals(manifest, Destination({}, CPU), {"push": None}):
            pass
    return live.peak


@pytest.mark.parametrize(
    ("vocab_size", "intermediate_size"),
    [(384, 128), (1 << 18, 128), (1 << 20, 128), (1 << 18, 1 << 14), (384, 1 << 18)],
)
def test_an_engine_allocates_what_is_planned(
    vocab_size: int, intermediate_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the embedding, the head and the matrices between them are."""
    shape = shape_of(tmp_path, vocab_size, intermediate_size)
    planned = push_bytes(shape, tensor_parallel=1)
    assert planned <= received_bytes(shape, monkeypatch) < planned + 6 * 512  # each is rounded up


def test_a_trainer_sends_as_many_parts_at_a_time_as_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy in the host's memory: each part is made here where it would move to the GPU."""
    part_bytes = 4096
    group = WeightProcessGroup(Mock(), None, name="push", world_size=2, backend="gloo")
    monkeypatch.setattr(group, "_start", lambda part, _deadline: [part])
    monkeypatch.setattr(group, "_await", lambda *_: None)
    live = LiveBytes()
    with live:
        group.broadcast((torch.empty(part_bytes, dtype=torch.uint8) for _ in range(12)), timeout_s=60.0)
    assert live.peak == PARTS_IN_FLIGHT * part_bytes


def test_two_large_weights_may_exist_at_a_time(tmp_path: Path) -> None:
    """The embedding's last parts are in flight when the head's first is received, with one bucket between them."""
    shape = shape_of(tmp_path, 1 << 20)
    assert push_bytes(shape, tensor_parallel=1) == 2 * shape.num_parameters


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_processes_put_whole_weights_together(
    tensor_parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest twice, and a shard of it: more than what arrives, where that is little besides."""
    shape = shape_of(tmp_path, 4096)
    monkeypatch.setattr(dist, "get_world_size", lambda _: tensor_parallel)
    section = Section(size=4096, stride=4096 // tensor_parallel)
    own = torch.empty(4096 // tensor_parallel, 64, dtype=torch.bfloat16)
    memory = GatherMemory.of([Shard(tensor=own, cut=Cut(dim=0, sections=(section,), rank=0))], Mock())
    allocated = memory.sent.nbytes + memory.received.nbytes + memory.whole.nbytes
    assert allocated == (2 * 4096 + 4096 // tensor_parallel) * 64 * 2
    assert push_bytes(shape, tensor_parallel=tensor_parallel) == max(allocated, push_bytes(shape, tensor_parallel=1))
