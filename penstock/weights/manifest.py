"""The contents of a push and their packing: named tensors, end to end in buckets of bounded size.

Trainer and engine must see the same bytes in the same order, so the layout depends only on the names, dtypes, shapes
and order of the tensors.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch

from penstock.errors import InvalidRequestError
from penstock.v1 import rollout_pb2

ALONE_BYTES = 1 << 20
"""Tensors of at least this size have their own bucket: the engine receives them in place, without unpacking."""
MAX_BUCKET_BYTES = 16 << 20
"""Small tensors fill buckets of at most this size, and larger tensors are broadcast in parts of this size. Five parts
are in flight, which take at most 80 MiB of each member's memory: a full GPU has those to spare."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a push."""

    name: str
    """Its name in the checkpoint."""
    dtype: str
    """Its torch dtype without the prefix: "bfloat16"."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> Self:
        """Describe a tensor, with its own dtype or another one."""
        return cls(name=name, dtype=str(dtype or tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Its size in a bucket."""
        return math.prod(self.shape) * int(dtype_of(self.dtype).itemsize)


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The buckets of a push, in order; each lists the tensors that it concatenates."""

    buckets: tuple[tuple[TensorSpec, ...], ...]

    @classmethod
    def plan(cls, specs: Iterable[TensorSpec], *, max_bucket_bytes: int) -> Self:
        """Fill buckets in order.

        A tensor of at least `ALONE_BYTES` or above the limit has its own bucket. A tensor that would not be aligned
        starts a new one.

        Raises:
            ValueError: a name occurs twice.
        """
        buckets: list[list[TensorSpec]] = []
        filled, seen, is_open = 0, set(), False
        for spec in specs:
            if spec.name in seen:
                raise ValueError(f"tensor {spec.name} occurs twice; push tied parameters once")
            seen.add(spec.name)
            unaligned = filled % dtype_of(spec.dtype).itemsize != 0
            alone = spec.num_bytes >= ALONE_BYTES
            if not is_open or alone or unaligned or filled + spec.num_bytes > max_bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(spec)
            filled += spec.num_bytes
            is_open = not alone
        return cls(tuple(tuple(bucket) for bucket in buckets))

    @classmethod
    def from_proto(cls, message: rollout_pb2.WeightManifest) -> Self:
        """Read and check a message.

        Raises:
            InvalidRequestError: no tensors, a repeated name, a dtype unknown to torch or a negative size.
        """
        manifest = cls(
            tuple(
                tuple(TensorSpec(name=spec.name, dtype=spec.dtype, shape=tuple(spec.shape)) for spec in bucket.tensors)
                for bucket in message.buckets
            )
        )
        names = [spec.name for spec in manifest.tensors]
        if not names or not all(manifest.buckets):
            raise InvalidRequestError("manifest has an empty bucket, or no buckets; list the tensors of the push")
        if len(set(names)) != len(names):
            raise InvalidRequestError("manifest names a tensor twice; push tied parameters once")
        for spec in manifest.tensors:
            dtype_of(spec.dtype)
            if any(size < 0 for size in spec.shape):
                raise InvalidRequestError(f"manifest: tensor {spec.name} has shape {list(spec.shape)}")
        return manifest

    def to_proto(self) -> rollout_pb2.WeightManifest:
        """Return the manifest as a message."""
        return rollout_pb2.WeightManifest(
            buckets=[
                rollout_pb2.WeightBucket(
                    tensors=[
                        rollout_pb2.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in bucket
                    ]
                )
                for bucket in self.buckets
            ]
        )

    def offsets(self, alignment: int) -> list[int]:
        """Return the start of each bucket and the end of the last, end to end, each start a multiple of `alignment`."""
        offsets, end = [], 0
        for bucket in self.buckets:
            offsets.append(end)
            end += sum(spec.num_bytes for spec in bucket)
            end += -end % alignment
        return [*offsets, end]

    def tensor_offsets(self, alignment: int) -> dict[str, int]:
        """Return the start of each tensor by name, with buckets end to end as `offsets` has them."""
        starts: dict[str, int] = {}
        for bucket, first in zip(self.buckets, self.offsets(alignment), strict=False):
            for spec in bucket:
                starts[spec.name] = first
                first += spec.num_bytes
        return starts

    def bucket_views(self, data: torch.Tensor, alignment: int) -> list[torch.Tensor]:
        """Return each bucket's part of memory, uint8[bytes], in which they are end to end as `offsets` has them."""
        sizes = (sum(spec.num_bytes for spec in bucket) for bucket in self.buckets)
        return [data[first : first + size] for first, size in zip(self.offsets(alignment), sizes, strict=False)]

    @property
    def tensors(self) -> list[TensorSpec]:
        """All tensors, in order."""
        return [spec for bucket in self.buckets for spec in bucket]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(spec.num_bytes for spec in self.tensors)


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Describe tensors by checkpoint name, in their order."""
    return tuple(TensorSpec.of(name, tensor) for name, tensor in tensors.items())


def pack(
    bucket: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Concatenate a bucket's tensors, each in row-major order, to uint8[bytes] on their device.

    It always copies, into `out` if given.

    Raises:
        ValueError: a tensor differs from the manifest.
    """
    parts = []
    for spec in bucket:
        tensor = tensors[spec.name].detach()
        if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype_of(spec.dtype):
            raise ValueError(
                f"tensor {spec.name} is {tensor.dtype}{list(tensor.shape)}, announced as {spec.dtype}{spec.shape}"
            )
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
    return torch.cat(parts, out=out)


def views(bucket: Sequence[TensorSpec], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a bucket as views of `data`; the inverse of `pack`. `Manifest.plan` aligns them.

    Raises:
        ValueError: `data` has more or fewer bytes than the manifest says.
    """
    if data.numel() != sum(spec.num_bytes for spec in bucket):
        raise ValueError(f"bucket has {data.numel()} bytes, {sum(spec.num_bytes for spec in bucket)} were announced")
    tensors, first = {}, 0
    for spec in bucket:
        part = data[first : first + spec.num_bytes]
        tensors[spec.name] = part.view(dtype_of(spec.dtype)).view(spec.shape)
        first += spec.num_bytes
    return tensors


def chunks(data: torch.Tensor, max_bytes: int) -> tuple[torch.Tensor, ...]:
    """Cut a bucket into views of at most `max_bytes`, as broadcast sends them; 0: one view."""
    return data.split(max_bytes) if max_bytes else (data,)


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of that name.

    Raises:
        InvalidRequestError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidRequestError(f"dtype {name!r} is unknown to torch; give for example 'bfloat16'")
    return dtype
