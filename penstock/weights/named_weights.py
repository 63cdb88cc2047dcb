"""Weights that come one after the other, so that not all of them need to be there at a time."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from penstock.weights.manifest import TensorSpec, specs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """Named tensors in a fixed order. Read it once; a reader that leaves must close its iterator."""

    specs: tuple[TensorSpec, ...]
    """What will come, known before anything has."""
    device: torch.device
    """Where the tensors are."""
    tensors: Iterable[tuple[str, torch.Tensor]]
    """One may be gone when the next has come, unless its reader keeps it."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return tensors that are all there, at least one.

        Raises:
            ValueError: one tensor has two names.
        """
        owners: dict[int, str] = {}
        for name, tensor in tensors.items():
            if tensor.numel() and (other := owners.setdefault(tensor.data_ptr(), name)) != name:
                raise ValueError(f"{name} and {other} are one tensor; push tied parameters once")
        device = next(iter(tensors.values())).device
        return cls(specs=specs_of(tensors), device=device, tensors=tensors.items())

    def __iter__(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yield name and tensor."""
        yield from self.tensors
