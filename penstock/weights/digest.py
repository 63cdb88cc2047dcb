"""A 64-bit digest of a tensor's bytes, which shows whether the engine holds what was trained.

It depends on every bit and its position, so it detects swapped values and flipped signs. It guards against mistakes,
not against an adversary. There are two kinds, each equal on every device: "xxh3" is XXH3-64 of the bytes, as fast as a
CPU core reads memory, and lets other threads run; "multilinear" is as fast on a GPU, with torch's operations. The
trainer chooses by the device of its weights (`digest_kind`).

Multilinear: the bytes are read as 32-bit words w, cut into blocks of `BLOCK_WORDS`. A block's sum is Σ w·m mod 2^64
with fixed pseudo-random odd 64-bit multipliers m (multilinear hashing: two words that differ cannot cancel except with
probability 2^-32). The sums are mixed with the number of their block by splitmix64's finaliser and added.
"""

import functools
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
import xxhash

from penstock.errors import InvalidRequestError

XXH3: Final = "xxh3"
MULTILINEAR: Final = "multilinear"

BLOCK_WORDS = 1 << 15
"""Words per block: a block and its multipliers fit into a core's cache."""

_BLOCKS_AT_ONCE = 256
"""Bounds a digest's temporary memory to 64 MiB."""

_MAX_THREADS = 8
"""More threads than this would wait for memory."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest_kind(device: torch.device) -> str:
    """Return the kind of digest that is fast on `device`."""
    return XXH3 if device.type == "cpu" else MULTILINEAR


def require_digest_kind(kind: str) -> None:
    """Check the kind in a request.

    Raises:
        InvalidRequestError: the kind is unknown.
    """
    if kind not in (XXH3, MULTILINEAR):
        raise InvalidRequestError(f"digest {kind!r} is unknown to this engine; use {XXH3!r} or {MULTILINEAR!r}")


def digest_pool(device: torch.device) -> ThreadPoolExecutor:
    """Return threads for digests of tensors on `device`: one per useful core, or one for a GPU."""
    num_threads = _num_threads() if device.type == "cpu" else 1
    return ThreadPoolExecutor(num_threads, thread_name_prefix="digest")


def _num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def tensor_digest(tensor: torch.Tensor, kind: str = XXH3) -> int:
    """Return the digest of the tensor's elements in row-major order, on any device; 0 to 2^64 - 1.

    The digest does not include dtype and shape: compare those too.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if kind == XXH3:
        return _xxh3(data)
    assert kind == MULTILINEAR, kind
    return _multilinear(data)


def tensor_digests(tensors: Iterable[tuple[str, torch.Tensor]], kind: str = XXH3) -> dict[str, int]:
    """Return the digest of each tensor by name, computed on all useful cores.

    Tensors are taken as their digests are computed, one for each core, so an iterator that makes them needs no room for
    all. Those of a GPU are read in this thread, whose stream is ordered after pending writes, as no other thread's is.
    """
    found: dict[str, int] = {}
    pending: deque[tuple[str, Future[int]]] = deque()
    with digest_pool(torch.device("cpu")) as pool:
        for name, tensor in tensors:
            found[name] = 0  # so that the names stay in their order
            if tensor.device.type != "cpu":
                found[name] = tensor_digest(tensor, kind)
            else:
                pending.append((name, pool.submit(tensor_digest, tensor, kind)))
            del tensor
            if len(pending) >= _num_threads():
                first, digest = pending.popleft()
                found[first] = digest.result()
        found.update((name, digest.result()) for name, digest in pending)
    return found


def _xxh3(data: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    state.update(memoryview(data.cpu().numpy()))
    return state.intdigest()


def _multilinear(data: torch.Tensor) -> int:
    num_bytes = data.numel()
    if num_bytes % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -num_bytes % 4))
    words_N = data.view(torch.int32)
    sums = _block_sums_cpu(words_N) if words_N.device.type == "cpu" else _block_sums_device(words_N)
    total = _mix(num_bytes)
    for number, block_sum in enumerate(sums, start=1):
        total += _mix(block_sum + number * _GOLDEN)
    return total & _MASK


def _block_sums_cpu(words_N: torch.Tensor) -> Iterable[int]:
    """Compute the block sums in numpy, which multiplies integers twice as fast as torch, in place and in cache."""
    words, multipliers = words_N.numpy(), _multipliers("cpu").numpy()
    product = np.empty(min(BLOCK_WORDS, len(words)), dtype=np.int64)
    for first in range(0, len(words), BLOCK_WORDS):
        block = words[first : first + BLOCK_WORDS]
        part = product[: len(block)]
        np.copyto(part, block)
        np.multiply(part, multipliers[: len(block)], out=part)
        yield int(np.add.reduce(part))


def _block_sums_device(words_N: torch.Tensor) -> Iterable[int]:
    multipliers_N = _multipliers(str(words_N.device))
    step = BLOCK_WORDS * _BLOCKS_AT_ONCE
    for first in range(0, words_N.numel(), step):
        yield from _block_sums(words_N[first : first + step], multipliers_N)


def _block_sums(words_N: torch.Tensor, multipliers_N: torch.Tensor) -> list[int]:
    """Return Σ w·m of each block; the last block may be short."""
    if words_N.numel() <= BLOCK_WORDS:
        return [int((words_N.to(torch.int64) * multipliers_N[: words_N.numel()]).sum())]
    num_full = words_N.numel() // BLOCK_WORDS
    full_BN = words_N[: num_full * BLOCK_WORDS].view(num_full, BLOCK_WORDS)
    sums: list[int] = (full_BN.to(torch.int64) * multipliers_N).sum(dim=1).tolist()
    rest_N = words_N[num_full * BLOCK_WORDS :]
    return sums + (_block_sums(rest_N, multipliers_N) if rest_N.numel() else [])


@functools.cache
def _multipliers(device: str) -> torch.Tensor:
    numbers = np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((numbers | np.uint64(1)).view(np.int64)).to(device)


def _mix(number: int) -> int:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
