"""Weights as compressed blocks, for slow links: the change since another version, or all weights.

A block is a part of one tensor. In a delta it is the exclusive or of old and new bytes, else the new bytes. Numbers
change mostly in their low bytes and share their high ones, so all first bytes are stored together, then all second
bytes, and so on; that compresses well. Compressed blocks follow each other in the manifest's order, each after its
length. A delta that is applied to the wrong base gives wrong weights, which the digests after a push reveal.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
import zstandard

from penstock.weights.manifest import Manifest, TensorSpec, dtype_of, views

BLOCK_BYTES = 1 << 24
"""Size of a block before compression. Each side holds a few of them at a time."""

_LEVEL = 1
"""Higher levels save a few per cent more and take several times as long."""

_LENGTH = struct.Struct("<Q")


def encode_block(old: torch.Tensor | None, new: torch.Tensor) -> bytes:
    """Compress the change from `old` to `new`, of equal dtype and shape; with None, all of `new`."""
    changed = _bytes_of(new) if old is None else np.bitwise_xor(_bytes_of(old), _bytes_of(new))
    numbers = changed.reshape(new.numel(), new.element_size())
    planes = np.empty(numbers.shape[::-1], dtype=np.uint8)
    for index, plane in enumerate(planes):  # several times as fast as a transposed copy
        plane[:] = numbers[:, index]
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(planes.tobytes())


def apply_block(held: torch.Tensor, block: bytes, *, is_delta: bool) -> None:
    """Replace the old bytes in `held` with the new ones. `held` may be non-contiguous.

    Raises:
        ValueError: the block is damaged, or belongs to another tensor.
    """
    try:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(block), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"block is damaged: {error}") from None
    if len(planes) != held.numel() * held.element_size():
        raise ValueError(f"block of {len(planes)} bytes does not fit tensor {held.dtype}{list(held.shape)}")
    if not held.numel():
        return
    numbers = np.empty((held.numel(), held.element_size()), dtype=np.uint8)
    for index, plane in enumerate(planes.reshape(held.element_size(), held.numel())):
        numbers[:, index] = plane
    changed = torch.from_numpy(numbers).view(-1).to(held.device)
    if is_delta:
        changed.bitwise_xor_(held.contiguous().as_strided((held.numel(),), (1,)).view(torch.uint8))
    held.copy_(changed.view(held.dtype).view(held.shape))


def write_blocks(
    file: BinaryIO, manifest: Manifest, new: Sequence[torch.Tensor], *, old: Sequence[torch.Tensor] | None
) -> int:
    """Write the change from `old` to the buckets `new` (None: all of `new`); return the size in bytes. Blocking."""
    num_bytes = 0
    for index, specs in enumerate(manifest.buckets):
        news = views(specs, new[index])
        olds = None if old is None else views(specs, old[index])
        for name, tensor in news.items():
            before = [None] * _num_blocks(tensor.dtype, tensor.numel()) if olds is None else _blocks(olds[name])
            for block, base in zip(_blocks(tensor), before, strict=True):
                compressed = encode_block(base, block)
                num_bytes += file.write(_LENGTH.pack(len(compressed))) + file.write(compressed)
    return num_bytes


def apply_blocks(
    file: BinaryIO, specs: Sequence[TensorSpec], held: Mapping[str, torch.Tensor], *, is_delta: bool
) -> None:
    """Change the tensors in `held`, one at a time.

    Raises:
        ValueError: the file is damaged, or contains other tensors.
    """
    for spec in specs:
        tensor = held[spec.name]
        dense = tensor.contiguous()  # the tensor itself, if it is contiguous
        for block in _blocks(dense):
            apply_block(block, _next_block(file), is_delta=is_delta)
        if dense is not tensor:
            tensor.copy_(dense)


def read_blocks(file: BinaryIO, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, one at a time, from blocks that contain all weights.

    Raises:
        ValueError: the file is damaged, or contains other tensors.
    """
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
        apply_blocks(file, [spec], {spec.name: tensor}, is_delta=False)
        yield spec.name, tensor


def _next_block(file: BinaryIO) -> bytes:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise ValueError("blocks end before the last tensor")
    (length,) = _LENGTH.unpack(head)
    block = file.read(length)
    if len(block) < length:
        raise ValueError("blocks end in the middle of one")
    return block


def _num_blocks(dtype: torch.dtype, numel: int) -> int:
    return -(-numel // (BLOCK_BYTES // int(dtype.itemsize)))


def _blocks(dense: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most `BLOCK_BYTES` each."""
    step = BLOCK_BYTES // dense.element_size()
    flat = dense.view(-1)
    return (flat[first : first + step] for first in range(0, flat.numel(), step))


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
