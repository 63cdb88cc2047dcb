"""Weights that are read one tensor at a time, or written by the processes that hold them, so that none has a copy."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from penstock.v1 import rollout_pb2
from penstock.weights.manifest import ALONE_BYTES, Manifest, TensorSpec, specs_of, views
from penstock.weights.shared_memory import ALIGNMENT, SharedMemoryPool

WriteWeights = Callable[[rollout_pb2.SharedMemorySource, Mapping[str, int]], None]
"""Writes all tensors into shared memory of the host, each, by its name, from an offset in bytes. Blocking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """Named tensors in a fixed order. Read it once; a reader that stops early must close its iterator."""

    specs: tuple[TensorSpec, ...]
    """Specs of the tensors, known before any has arrived."""
    device: torch.device
    """Where the weights are; what several processes have written is in the host's memory."""
    tensors: Iterable[tuple[str, torch.Tensor]]
    """The tensors; each may be gone when the next arrives, unless its reader keeps it."""
    base_digests: Mapping[str, int] = field(default_factory=dict)
    """Digests of further weights, which their receiver must hold already, by checkpoint name: the base of adapters. Of
    the kind that is fast on `device`."""
    write: WriteWeights | None = None
    """For weights that several processes hold: each writes what it has, and none ever has a whole tensor."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the named weights of tensors that are all present, at least one.

        Raises:
            ValueError: one tensor has two names.
        """
        owners: dict[int, str] = {}
        for name, tensor in tensors.items():
            if tensor.numel() and (other := owners.setdefault(tensor.data_ptr(), name)) != name:
                raise ValueError(f"{name} and {other} are one tensor; push tied parameters once")
        device = next(iter(tensors.values())).device
        return cls(specs=specs_of(tensors), device=device, tensors=tensors.items())

    def written_by(self, write: WriteWeights) -> Self:
        """Return these weights as several processes hold them. Reading `tensors` makes every process write its own.

        Args:
            write: Makes them write.
        """
        return replace(self, tensors=_written(write, self.specs), write=write)

    def __iter__(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yield name and tensor."""
        yield from self.tensors


def _written(write: WriteWeights, specs: tuple[TensorSpec, ...]) -> Generator[tuple[str, torch.Tensor]]:
    manifest = Manifest.plan(specs, max_bucket_bytes=ALONE_BYTES)
    memory = SharedMemoryPool().allocate(manifest.offsets(ALIGNMENT)[-1], torch.device("cpu"))
    write(memory.message, manifest.tensor_offsets(ALIGNMENT))
    for bucket, data in zip(manifest.buckets, manifest.bucket_views(memory.data, ALIGNMENT), strict=True):
        yield from views(bucket, data).items()
