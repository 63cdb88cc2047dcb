"""Weights as compressed pieces, for links that are slow: what has changed against another version, or all of it.

A piece is a block of one tensor. Against a base it is the exclusive or of old and new bytes; else the new bytes.
Numbers of a tensor change in their low bytes, mostly, and are alike in their high ones, so first bytes are laid beside
first bytes, second beside second; that compresses well. Pieces follow each other in the manifest's order, each behind
its length. Applied to other weights than the base they make neither, which the digests after a push show.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
import zstandard

from penstock.weights.manifest import Manifest, TensorSpec, dtype_of, views

BLOCK_BYTES = 1 << 24
"""Size of a block, before compression: what each side holds at a time, a few times over."""

_LEVEL = 1
"""Higher levels save a few per cent more, and take several times as long."""

_LENGTH = struct.Struct("<Q")


def encode_block(old: torch.Tensor | None, new: torch.Tensor) -> bytes:
    """From one tensor to another of the same dtype and shape; None: all of `new`."""
    changed = _bytes_of(new) if old is None else np.bitwise_xor(_bytes_of(old), _bytes_of(new))
    numbers = changed.reshape(new.numel(), new.element_size())
    planes = np.empty(numbers.shape[::-1], dtype=np.uint8)
    for index, plane in enumerate(planes):  # several times as fast as a transposed copy
        plane[:] = numbers[:, index]
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(planes.tobytes())


def apply_block(held: torch.Tensor, piece: bytes, *, is_delta: bool) -> None:
    """Change `held`, which holds the old bytes if it is a delta, into the new ones. It may have gaps in memory.

    Raises:
        ValueError: the piece is damaged, or of another tensor.
    """
    try:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(piece), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"piece is damaged: {error}") from None
    if len(planes) != held.numel() * held.element_size():
        raise ValueError(f"piece of {len(planes)} bytes is not of this tensor: {held.dtype}{list(held.shape)}")
    if not held.numel():
        return
    numbers = np.empty((held.numel(), held.element_size()), dtype=np.uint8)
    for index, plane in enumerate(planes.reshape(held.element_size(), held.numel())):
        numbers[:, index] = plane
    changed = torch.from_numpy(numbers).view(-1).to(held.device)
    if is_delta:
        changed.bitwise_xor_(held.contiguous().as_strided((held.numel(),), (1,)).view(torch.uint8))
    held.copy_(changed.view(held.dtype).view(held.shape))


def write_pieces(
    file: BinaryIO, manifest: Manifest, new: Sequence[torch.Tensor], *, old: Sequence[torch.Tensor] | None
) -> int:
    """Write the buckets `new` against `old` (None: all of them); returns how many bytes. Blocking."""
    num_bytes = 0
    for index, specs in enumerate(manifest.buckets):
        news = views(specs, new[index])
        olds = None if old is None else views(specs, old[index])
        for name, tensor in news.items():
            before = [None] * _num_blocks(tensor.dtype, tensor.numel()) if olds is None else _blocks(olds[name])
            for block, base in zip(_blocks(tensor), before, strict=True):
                piece = encode_block(base, block)
                num_bytes += file.write(_LENGTH.pack(len(piece))) + file.write(piece)
    return num_bytes


def apply_pieces(
    file: BinaryIO, specs: Sequence[TensorSpec], held: Mapping[str, torch.Tensor], *, is_delta: bool
) -> None:
    """Change the tensors that are held, one after the other.

    Raises:
        ValueError: the file is damaged, or of other tensors.
    """
    for spec in specs:
        tensor = held[spec.name]
        dense = tensor.contiguous()  # itself, unless it has gaps
        for block in _blocks(dense):
            apply_block(block, _next_piece(file), is_delta=is_delta)
        if dense is not tensor:
            tensor.copy_(dense)


def read_pieces(file: BinaryIO, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one after the other, of pieces that are against nothing.

    Raises:
        ValueError: the file is damaged, or of other tensors.
    """
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
        apply_pieces(file, [spec], {spec.name: tensor}, is_delta=False)
        yield spec.name, tensor


def _next_piece(file: BinaryIO) -> bytes:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise ValueError("pieces end before the last tensor")
    (length,) = _LENGTH.unpack(head)
    piece = file.read(length)
    if len(piece) < length:
        raise ValueError("pieces end within one")
    return piece


def _num_blocks(dtype: torch.dtype, numel: int) -> int:
    return -(-numel // (BLOCK_BYTES // int(dtype.itemsize)))


def _blocks(dense: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's elements in parts of at most `BLOCK_BYTES`; each is a view."""
    step = BLOCK_BYTES // dense.element_size()
    flat = dense.view(-1)
    return (flat[first : first + step] for first in range(0, flat.numel(), step))


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
