"""Weights in memory that other processes of the same machine can read: a segment, with all buckets, end to end.

On a CPU it is anonymous memory (memfd), which others open through its owner's entry in /proc, by number and name. It
has no name in any folder, so nothing can be left behind: it is gone when the last process that has it open is gone,
however that ended. On a GPU it is memory that is shared by a CUDA handle, with the same property; see `cuda_memory`.
"""

import errno
import mmap
import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch

from penstock.errors import NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights import cuda_memory

ALIGNMENT = 256
"""Buckets begin at multiples of it, so that tensors of every dtype are aligned."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of this process. Others can open it as long as any part of `data` is referred to."""

    data: torch.Tensor
    """uint8[bytes]."""
    message: rollout_pb2.WeightSegment
    """How others open it."""


class Segments:
    """Makes segments. Of those on a CPU the memory of one that is gone, with every part of it, becomes the next one's,
    if that is of its size: new pages cost several times what it takes to fill them.
    """

    def __init__(self) -> None:
        """None is there yet."""
        self._spare: _Memory | None = None

    def create(self, size_bytes: int, device: torch.device) -> Segment:
        """Allocate a segment of `size_bytes` (1 or more) where `device` is. Its content is undefined.

        Raises:
            OSError: there is not so much memory on the GPU.
        """
        message = rollout_pb2.WeightSegment(machine=machine(), size_bytes=size_bytes)
        if device.type == "cuda":
            on_gpu = cuda_memory.allocate(size_bytes, device)
            message.cuda.handle, message.cuda.device_uuid = on_gpu.handle, cuda_memory.device_uuid(device)
            return Segment(on_gpu.data, message)
        memory, self._spare = self._spare, None
        if memory is None or memory.size_bytes != size_bytes:
            memory = _Memory(size_bytes)
        message.shared.process_id, message.shared.descriptor = os.getpid(), memory.descriptor
        message.shared.name = memory.name
        view = memoryview(memory.mapping)  # tensors hold it until the last of them is gone
        weakref.finalize(view, self._keep, memory).atexit = False
        return Segment(torch.frombuffer(view, dtype=torch.uint8), message)

    def _keep(self, memory: "_Memory") -> None:
        self._spare = memory


class _Memory:
    """A memfd, mapped: memory of this process and of others that have it open."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.name = f"penstock-{uuid.uuid4().hex}"
        self.descriptor = os.memfd_create(self.name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size_bytes)
        self.mapping = mmap.mmap(self.descriptor, size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSource:
    """Another process's segment: what is needed to open it, as plain values."""

    size_bytes: int
    path: str = ""
    """Of shared memory."""
    name: str = ""
    cuda_handle: str = ""
    """Of a GPU's memory, in hexadecimal digits."""
    cuda_device: str = ""

    @classmethod
    def of(cls, message: rollout_pb2.WeightSegment) -> Self:
        """Check that it can be opened here, as far as that can be known without a GPU's context.

        Raises:
            NotReadyError: it cannot.
        """
        if message.machine != machine():
            raise NotReadyError(
                "the segment is on another machine than this engine, or in another container; let the trainer broadcast"
            )
        if message.HasField("cuda"):
            if message.cuda.device_uuid not in cuda_memory.visible_devices():
                raise NotReadyError("the segment is on a GPU that this engine does not see; let the trainer broadcast")
            return cls(
                size_bytes=message.size_bytes,
                cuda_handle=message.cuda.handle.hex(),
                cuda_device=message.cuda.device_uuid,
            )
        shared = message.shared
        source = cls(
            size_bytes=message.size_bytes, path=f"/proc/{shared.process_id}/fd/{shared.descriptor}", name=shared.name
        )
        with open_segment(source):
            return source


class Reader(Protocol):
    """An open segment."""

    def read(self, first: int, target: torch.Tensor) -> None:
        """Fill `target`, uint8[bytes], contiguous, with the bytes from `first` on. Blocking."""


@contextmanager
def open_segment(source: SegmentSource) -> Iterator[Reader]:
    """Open a segment of another process, for reading.

    Raises:
        NotReadyError: it is not there any more, or cannot be opened from here.
    """
    if source.cuda_handle:
        with cuda_memory.opened(bytes.fromhex(source.cuda_handle), source.cuda_device, source.size_bytes) as data:
            reader = _CudaReader(data)
            try:
                yield reader
            finally:
                reader.wait()
        return
    try:
        descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotReadyError(
            f"segment {source.path} cannot be opened here ({error}); let the trainer broadcast"
        ) from None
    try:
        # Of the open file, not of the path: its owner may be gone and another process have its number.
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if source.name not in name or os.fstat(descriptor).st_size != source.size_bytes:
            raise NotReadyError(f"segment {source.path} is {name} now, not {source.name}; let the trainer broadcast")
        yield _FileReader(descriptor)
    finally:
        os.close(descriptor)


class _FileReader:
    """Reads straight into the target: no mapping, whose pages would have to be faulted in one by one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, first: int, target: torch.Tensor) -> None:
        if target.device.type != "cpu":
            buffer = torch.empty(target.numel(), dtype=torch.uint8)
            self.read(first, buffer)
            target.copy_(buffer)
            return
        left = memoryview(target.numpy())
        while left:
            num_bytes = os.preadv(self._descriptor, [left], first)
            if not num_bytes:
                raise OSError(errno.EIO, "the segment ends too early")
            first += num_bytes
            left = left[num_bytes:]


class _CudaReader:
    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._devices: set[torch.device] = set()

    def read(self, first: int, target: torch.Tensor) -> None:
        target.copy_(self._data[first : first + target.numel()])
        if target.is_cuda:
            self._devices.add(target.device)

    def wait(self) -> None:
        """Until all has arrived, on whatever GPU it was for."""
        for device in self._devices:
            torch.cuda.synchronize(device)


def machine() -> str:
    """What two processes share that see each other in /proc: the boot of a machine, and a space of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {uuid.getnode():x} {os.getpid()}"  # equal to nobody else's
