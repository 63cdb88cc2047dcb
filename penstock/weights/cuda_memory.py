"""GPU memory that another process can open, through the CUDA driver. It has been run on one GPU, into a plain process.

torch shares tensors differently: it counts references in a file, and never frees memory whose reader was killed. Here
only the owner decides, and the driver frees a dead process's memory. It frees it at once, so an engine that reads while
its trainer is killed gets an error from CUDA and may have to be restarted.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from cuda.bindings import driver
from cuda.pathfinder import DynamicLibNotFoundError

from penstock.errors import NotReadyError

log = structlog.get_logger()

_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """GPU memory of this process that others can open."""

    data: torch.Tensor
    """uint8[bytes]; the memory is freed when no tensor refers to it."""
    handle: bytes
    """The handle with which other processes open it."""


class _Allocation:
    """Lets torch make a tensor of memory that it has not allocated."""

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
        # May run in any thread. When the process ends, the driver frees everything on its own.
        if self._is_ours and not sys.is_finalizing():
            with _context_of(self._device):
                _warn("cuMemFree", driver.cuMemFree(self._pointer))


def allocate(size_bytes: int, device: torch.device) -> CudaMemory:
    """Allocate outside torch's allocator, because a handle always stands for a whole allocation.

    Raises:
        OSError: the GPU does not have enough memory.
    """
    with _context_of(device):
        numbered = torch.device("cuda", torch.cuda.current_device())
        pointer = int(_value("cuMemAlloc", driver.cuMemAlloc(size_bytes)))
        allocation = _Allocation(pointer, size_bytes, numbered, is_ours=True)
        handle = _value("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(pointer))
        data = torch.as_tensor(allocation, device=numbered)
        return CudaMemory(data, ctypes.string_at(handle.getPtr(), _HANDLE_BYTES))


@contextmanager
def opened(handle: bytes, uuid: str, size_bytes: int) -> Iterator[torch.Tensor]:
    """Yield another process's memory, uint8[bytes], for reading. On exit its GPU has finished all reads.

    If the reads go to another GPU, the caller waits for that one.

    Raises:
        NotReadyError: the memory was freed, or is on a GPU that this process does not see.
    """
    devices = visible_devices()
    if uuid not in devices:
        raise NotReadyError("the trainer's memory is on a GPU that this engine does not see; use broadcast")
    device = torch.device("cuda", devices.index(uuid))
    copied = driver.CUipcMemHandle()
    ctypes.memmove(copied.getPtr(), handle, _HANDLE_BYTES)
    lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    try:
        with _context_of(device):
            pointer = int(_value("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(copied, lazily)))
    except OSError as error:
        raise NotReadyError(f"the trainer's memory cannot be opened here ({error}); use broadcast") from None
    try:
        yield torch.as_tensor(_Allocation(pointer, size_bytes, device, is_ours=False), device=device)
    finally:
        with _context_of(device):
            _warn("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(pointer))


def device_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which does not depend on its number in this process."""
    index: int = torch.cuda.current_device() if device.index is None else device.index
    return visible_devices()[index]


def visible_devices() -> list[str]:
    """Return the UUIDs of the GPUs that this process may use, in its order, without creating a context on any."""
    try:
        (status,) = driver.cuInit(0)
    except DynamicLibNotFoundError:
        return []
    if status != driver.CUresult.CUDA_SUCCESS:
        return []
    names = []
    for number in range(_value("cuDeviceGetCount", driver.cuDeviceGetCount())):
        device = _value("cuDeviceGet", driver.cuDeviceGet(number))
        names.append(bytes(_value("cuDeviceGetUuid", driver.cuDeviceGetUuid(device)).bytes).hex())
    return names


@contextmanager
def _context_of(device: torch.device) -> Iterator[None]:
    """Make torch's context of the device current in this thread, after all work on it has finished.

    In a thread that has not used a device, choosing it is not enough: the driver learns of it at the first call.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def _value(call: str, result: tuple[Any, Any]) -> Any:
    """Return the value of a driver call.

    Raises:
        OSError: the call failed.
    """
    status, value = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise OSError(int(status), f"{call} failed with {status.name}")
    return value


def _warn(call: str, result: tuple[Any]) -> None:
    (status,) = result
    if status != driver.CUresult.CUDA_SUCCESS:
        log.warning("cuda.call_failed", call=call, status=status.name)
