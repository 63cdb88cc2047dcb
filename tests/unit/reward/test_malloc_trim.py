"""Free memory is given back while the service rests."""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from services.reward import malloc_trim
from services.reward.admission_queue import AdmissionQueue
from tests.support.waiting import settled


def test_a_block_between_others_is_given_back() -> None:
    """By glibc, whose own habit is to keep what lies below something that is in use."""
    trim = malloc_trim.find_trim()
    if trim is None:
        pytest.skip("this C library has no malloc_trim")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    size_bytes = 64 * 2**10  # below the size from which blocks are mapped by themselves
    blocks = [libc.malloc(size_bytes) for _ in range(400)]
    for block in blocks:
        ctypes.memset(block, 1, size_bytes)
    for block in blocks[:-1]:
        libc.free(block)
    kept = _resident_bytes()
    trim(0)
    assert kept - _resident_bytes() > 300 * size_bytes
    libc.free(blocks[-1])


def _resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


async def test_once_after_each_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while there are items, and not again until there were some."""
    trims: list[int] = []
    trim: Callable[[int], None] = trims.append
    monkeypatch.setattr(malloc_trim, "find_trim", lambda: trim)
    may_look = asyncio.Semaphore(0)
    monkeypatch.setattr(malloc_trim, "asyncio", SimpleNamespace(sleep=lambda _: may_look.acquire()))

    async def let_it_look() -> None:
        for _ in range(3):
            may_look.release()
            await settled()

    queue = AdmissionQueue(10)
    trimming = asyncio.create_task(malloc_trim.trim_when_idle(queue))
    for num_bursts in range(3):
        await let_it_look()
        assert len(trims) == num_bursts
        with queue.admitted(2):
            with queue.admitted(3):
                pass
            await let_it_look()
            assert len(trims) == num_bursts
        await let_it_look()
        assert len(trims) == num_bursts + 1
    trimming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await trimming
