"""GPU memory that another process can open, by the CUDA driver's own calls. It has not run yet: no GPU was at hand.

Not torch's way of sharing tensors: that counts references in a file, and memory whose reader was killed is never freed.
Here the owner alone decides, and the driver frees what a dead process leaves. It frees it at once, so an engine that is
reading when its trainer is killed gets an error from CUDA, and may have to be started again.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from penstock.errors import NotReadyError

log = structlog.get_logger()

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of this process."""

    data: torch.Tensor
    """uint8[bytes]; the memory is freed when no tensor refers to it any more."""
    handle: bytes
    """By which others open it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Allocation:
    """What torch needs to make a tensor of memory that it has not allocated."""

    def __init__(self, pointer: int, size_bytes: int, device: torch.device, *, is_ours: bool) -> None:
        self._pointer = pointer
        self._device = device
        self._is_ours = is_ours
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }

    def __del__(self) -> None:
        # Whichever thread lets go of it last. At the end of the process the driver frees all by itself.
        if self._is_ours and not sys.is_finalizing():
            with _context_of(self._device):
                _note("cuMemFree", _driver().cuMemFree_v2(ctypes.c_uint64(self._pointer)))


def allocate(size_bytes: int, device: torch.device) -> CudaMemory:
    """Allocate, beside torch's own allocator: a handle is always of a whole allocation.

    Raises:
        OSError: there is not so much memory.
    """
    pointer, handle = ctypes.c_uint64(), _Handle()
    with _context_of(device):
        numbered = torch.device("cuda", torch.cuda.current_device())
        _succeed("cuMemAlloc", _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size_bytes)))
        allocation = _Allocation(pointer.value, size_bytes, numbered, is_ours=True)
        _succeed("cuIpcGetMemHandle", _driver().cuIpcGetMemHandle(ctypes.byref(handle), pointer))
        return CudaMemory(torch.as_tensor(allocation, device=numbered), bytes(handle))


@contextmanager
def opened(handle: bytes, uuid: str, size_bytes: int) -> Iterator[torch.Tensor]:
    """Another process's memory, uint8[bytes], for reading; on leaving, its GPU has finished all reads.

    A target on another GPU is for whoever reads to wait for.

    Raises:
        NotReadyError: it is gone, or on a GPU that this process does not see.
    """
    devices = visible_devices()
    if uuid not in devices:
        raise NotReadyError("the segment is on a GPU that this engine does not see; let the trainer broadcast")
    device = torch.device("cuda", devices.index(uuid))
    pointer, whose = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    try:
        with _context_of(device):
            status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), whose, _LAZY_PEER_ACCESS)
            _succeed("cuIpcOpenMemHandle", status)
    except OSError as error:
        raise NotReadyError(f"the segment cannot be opened here ({error}); let the trainer broadcast") from None
    try:
        yield torch.as_tensor(_Allocation(pointer.value, size_bytes, device, is_ours=False), device=device)
    finally:
        with _context_of(device):
            _note("cuIpcCloseMemHandle", _driver().cuIpcCloseMemHandle(pointer))


def device_uuid(device: torch.device) -> str:
    """The GPU's own name, whatever number it has in this process."""
    index: int = torch.cuda.current_device() if device.index is None else device.index
    return visible_devices()[index]


def visible_devices() -> list[str]:
    """The names of the GPUs that this process may use, in its order. It makes no context on any."""
    driver = _driver()
    count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    names = []
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    for number in range(count.value):
        _succeed("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number))
        _succeed("cuDeviceGetUuid", driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), device))
        names.append(bytes(uuid).hex())
    return names


@contextmanager
def _context_of(device: torch.device) -> Iterator[None]:
    """With torch's context of the device as this thread's, where all that was begun has ended; then as before.

    To choose a device is not enough in a thread that has used none: the driver knows of it from the first call to it.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _note(what: str, status: int) -> None:
    if status != 0:
        log.warning("cuda.call_failed", call=what, status=status)


def _succeed(what: str, status: int) -> None:
    if status != 0:
        raise OSError(status, f"{what} failed with CUDA error {status}")
