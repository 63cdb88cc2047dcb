"""Memory with all buckets of a snapshot, end to end, which other processes on the machine can read, and ranks write.

On a CPU it is anonymous memory (memfd), which others open through its owner's entry in /proc, by number and name. It
has no name in any folder, so nothing is left behind: it is freed when the last process that has it open ends, however
that happens. On a GPU it is memory shared by a CUDA handle, with the same property; see `cuda_memory`.
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
"""Buckets start at multiples of this many bytes, so that tensors of every dtype are aligned."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of this process. Others can open it while any part of `data` is referenced."""

    data: torch.Tensor
    """uint8[bytes]."""
    message: rollout_pb2.SharedMemorySource
    """Message with which others open it."""


class SharedMemoryPool:
    """Allocates shared memory.

    On a CPU, released memory of the same size is reused: faulting in new pages takes several times as long as filling
    them.
    """

    def __init__(self) -> None:
        """Start with nothing allocated."""
        self._spare: _Memory | None = None

    def allocate(self, size_bytes: int, device: torch.device) -> SharedMemory:
        """Allocate `size_bytes` (1 or more) on `device`. The content is undefined.

        Raises:
            OSError: the GPU does not have enough memory.
        """
        message = rollout_pb2.SharedMemorySource(machine=machine(), size_bytes=size_bytes)
        if device.type == "cuda":
            on_gpu = cuda_memory.allocate(size_bytes, device)
            message.cuda.handle, message.cuda.device_uuid = on_gpu.handle, cuda_memory.device_uuid(device)
            return SharedMemory(on_gpu.data, message)
        memory, self._spare = self._spare, None
        if memory is None or memory.size_bytes != size_bytes:
            memory = _Memory(size_bytes)
        message.host.process_id, message.host.descriptor = os.getpid(), memory.descriptor
        message.host.name = memory.name
        view = memoryview(memory.mapping)  # tensors keep the memory alive
        weakref.finalize(view, self._keep, memory).atexit = False
        return SharedMemory(torch.frombuffer(view, dtype=torch.uint8), message)

    def _keep(self, memory: "_Memory") -> None:
        self._spare = memory


class _Memory:
    """A mapped memfd."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.name = f"penstock-{uuid.uuid4().hex}"
        self.descriptor = os.memfd_create(self.name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size_bytes)
        self.mapping = mmap.mmap(self.descriptor, size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryHandle:
    """The data needed to open another process's memory, as plain values."""

    size_bytes: int
    path: str = ""
    """For host memory: the owner's entry in /proc."""
    name: str = ""
    cuda_handle: str = ""
    """For GPU memory: hexadecimal digits."""
    cuda_device: str = ""

    @classmethod
    def of(cls, message: rollout_pb2.SharedMemorySource) -> Self:
        """Return the handle if the memory can be opened here, as far as that is known without a CUDA context.

        Raises:
            NotReadyError: it cannot.
        """
        if message.machine != machine():
            raise NotReadyError(
                "the trainer's memory is on another machine than this engine, or in another container; use broadcast"
            )
        if message.HasField("cuda"):
            if message.cuda.device_uuid not in cuda_memory.visible_devices():
                raise NotReadyError("the trainer's memory is on a GPU that this engine does not see; use broadcast")
            return cls(
                size_bytes=message.size_bytes,
                cuda_handle=message.cuda.handle.hex(),
                cuda_device=message.cuda.device_uuid,
            )
        host = message.host
        handle = cls(
            size_bytes=message.size_bytes, path=f"/proc/{host.process_id}/fd/{host.descriptor}", name=host.name
        )
        with open_shared_memory(handle):
            return handle


class Reader(Protocol):
    """Reads open shared memory."""

    def read(self, first: int, target: torch.Tensor) -> None:
        """Fill `target`, uint8[bytes], contiguous, with the bytes from offset `first`. Blocking."""


@contextmanager
def open_shared_memory(handle: SharedMemoryHandle) -> Iterator[Reader]:
    """Open another process's memory for reading.

    Raises:
        NotReadyError: it was freed, or cannot be opened from here.
    """
    if handle.cuda_handle:
        with cuda_memory.opened(bytes.fromhex(handle.cuda_handle), handle.cuda_device, handle.size_bytes) as data:
            reader = _CudaReader(data)
            try:
                yield reader
            finally:
                reader.wait()
        return
    with _opened(handle, os.O_RDONLY) as descriptor:
        yield _FileReader(descriptor)


@contextmanager
def _opened(handle: SharedMemoryHandle, flags: int) -> Iterator[int]:
    """Open memory of the host; return its descriptor."""
    try:
        descriptor = os.open(handle.path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise NotReadyError(f"shared memory {handle.path} cannot be opened here ({error}); use broadcast") from None
    try:
        # Check the open file's name, not the path's: the owner may have ended and its process id been reused.
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if handle.name not in name or os.fstat(descriptor).st_size != handle.size_bytes:
            raise NotReadyError(f"shared memory {handle.path} is now {name}, not {handle.name}; use broadcast")
        yield descriptor
    finally:
        os.close(descriptor)


class Writer:
    """Writes into open memory of the host. A mapping would fault in its pages one at a time."""

    def __init__(self, descriptor: int) -> None:
        """Use `writing_into`."""
        self._descriptor = descriptor

    def write(self, first: int, source: torch.Tensor) -> None:
        """Write `source`, uint8[bytes], contiguous, in the host's memory, from offset `first`. Blocking.

        Raises:
            OSError: there is no memory for it.
        """
        left = memoryview(source.numpy())
        while left:
            num_bytes = os.pwrite(self._descriptor, left, first)
            first += num_bytes
            left = left[num_bytes:]


@contextmanager
def writing_into(source: rollout_pb2.SharedMemorySource) -> Iterator[Writer]:
    """Open another process's memory of the host, or this one's, for writing.

    Raises:
        NotReadyError: it was freed, or cannot be opened from here.
    """
    with _opened(SharedMemoryHandle.of(source), os.O_RDWR) as descriptor:
        yield Writer(descriptor)


class _FileReader:
    """Reads straight into the target. A mapping would fault in its pages one at a time."""

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
                raise OSError(errno.EIO, "the shared memory ends too early")
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
        """Wait until all reads have finished, on every GPU."""
        for device in self._devices:
            torch.cuda.synchronize(device)


def machine() -> str:
    """Return boot id and PID namespace: equal for processes that see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {uuid.getnode():x} {os.getpid()}"  # differs from every other process's
