"""Shared memory: another process reads exactly what was written, and no killed process leaves memory behind."""

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from penstock.errors import NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest, pack, specs_of, views
from penstock.weights.shared_memory import ALIGNMENT, SharedMemoryHandle, SharedMemoryPool, open_shared_memory

CPU = torch.device("cpu")


def opened_memory(name: str) -> list[str]:
    """Entries of this process's files that are the memory."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # the folder's own
            continue
    return [path for path in found if name in path]


def _own_memory(pipe: Connection) -> None:
    memory = SharedMemoryPool().allocate(3 << 20, CPU)
    memory.data.copy_(torch.arange(3 << 20) % 251)
    pipe.send(memory.message.SerializeToString())
    pipe.recv()


def test_another_process_reads_it_and_outlives_its_owner() -> None:
    """Once open it can be read to its end though the owner was killed -9; then it is gone."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    owner = context.Process(target=_own_memory, args=(its,), daemon=True)
    owner.start()
    message = rollout_pb2.SharedMemorySource.FromString(mine.recv())
    source = SharedMemoryHandle.of(message)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    with open_shared_memory(source) as reader:
        owner.kill()
        owner.join()
        reader.read(1 << 20, target)
        with pytest.raises(OSError, match="ends too early"):
            reader.read(5 << 19, torch.empty_like(target))
    assert torch.equal(target, (torch.arange(1 << 20, 2 << 20) % 251).to(torch.uint8))
    assert opened_memory(source.name) == []
    with pytest.raises(NotReadyError, match="cannot be opened"):
        SharedMemoryHandle.of(message)


def test_it_is_gone_when_nobody_refers_to_it() -> None:
    """Without a call to close anything, and without a name in any folder."""
    memory = SharedMemoryPool().allocate(1 << 20, CPU)
    message = memory.message
    name = message.host.name
    assert opened_memory(name)
    assert not [path for path in Path("/dev/shm").iterdir() if name in path.name]
    bucket = memory.data[256:512].fill_(7)
    del memory
    gc.collect()
    assert bucket.sum() == 7 * 256  # a part of it may still be used
    del bucket
    gc.collect()
    assert opened_memory(name) == []
    with pytest.raises(NotReadyError):
        SharedMemoryHandle.of(message)


def test_memory_is_reused_only_when_nothing_refers_to_it() -> None:
    """Two that are alive at a time never share; the next one of the same size gets what has become free, others not."""
    pool = SharedMemoryPool()
    first, second = pool.allocate(1000, CPU), pool.allocate(1000, CPU)
    names = [memory.message.host.name for memory in (first, second)]
    assert names[0] != names[1]
    part = first.data[10:20].fill_(5)
    del first
    between = pool.allocate(1000, CPU)
    assert between.message.host.name not in names, "a part of the first is still used"
    names.append(between.message.host.name)
    assert part.sum() == 50
    del part
    third = pool.allocate(1000, CPU)
    assert third.message.host.name == names[0]
    third.data.fill_(7)
    with open_shared_memory(SharedMemoryHandle.of(third.message)) as reader:
        target = torch.empty(1000, dtype=torch.uint8)
        reader.read(0, target)
    assert target.sum() == 7000
    del second, between, third
    other = pool.allocate(2000, CPU)
    assert other.message.host.name not in names
    assert [opened_memory(name) for name in names] == [[], [], []], "memory of another size is kept for nobody"


def test_what_is_something_else_is_refused() -> None:
    """Another machine, a number that another file has now, another size, a GPU that is not seen."""
    memory = SharedMemoryPool().allocate(1000, CPU)
    good = memory.message
    SharedMemoryHandle.of(good)

    def changed(**fields: object) -> rollout_pb2.SharedMemorySource:
        message = rollout_pb2.SharedMemorySource()
        message.CopyFrom(good)
        for name, value in fields.items():
            setattr(message.host if name in ("name", "descriptor") else message, name, value)
        return message

    for message, match in (
        (changed(machine="another"), "another machine"),
        (changed(name="penstock-other"), "not penstock-other"),
        (changed(descriptor=1), "is now .*, not"),
        (changed(descriptor=99_999), "cannot be opened"),
        (changed(size_bytes=1001), "is now .*, not"),
        (
            rollout_pb2.SharedMemorySource(machine=good.machine, cuda=rollout_pb2.CudaMemory(device_uuid="0" * 32)),
            "GPU",
        ),
    ):
        with pytest.raises(NotReadyError, match=match):
            SharedMemoryHandle.of(message)


def test_buckets_lie_in_it_aligned() -> None:
    """Each bucket is packed in its place, and read from there, whatever its size."""
    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(5, 5), "c": torch.zeros(0), "d": torch.randn(65)}
    manifest = Manifest.plan(specs_of(tensors), max_bucket_bytes=110)
    assert len(manifest.buckets) > 2
    *firsts, size_bytes = manifest.offsets(ALIGNMENT)
    assert [first % ALIGNMENT for first in (*firsts, size_bytes)] == [0] * (len(firsts) + 1)
    memory = SharedMemoryPool().allocate(size_bytes, CPU)
    with open_shared_memory(SharedMemoryHandle.of(memory.message)) as reader:
        for bucket, first in zip(manifest.buckets, firsts, strict=True):
            num_bytes = sum(spec.num_bytes for spec in bucket)
            pack(bucket, tensors, out=memory.data[first : first + num_bytes])
            target = torch.empty(num_bytes, dtype=torch.uint8)
            reader.read(first, target)
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in views(bucket, target).items())
