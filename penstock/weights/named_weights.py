"""Weights that arrive one tensor at a time, so that they need not all be in memory at once."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from penstock.weights.manifest import TensorSpec, specs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """Named tensors in a fixed order. Read it once; a reader that stops early must close its iterator."""

    specs: tuple[TensorSpec, ...]
    """Specs of the tensors, known before any has arrived."""
    device: torch.device
    """The tensors' device."""
    tensors: Iterable[tuple[str, torch.Tensor]]
    """The tensors; each may be gone when the next arrives, unless its reader keeps it."""
    base_digests: Mapping[str, int] = field(default_factory=dict)
    """Digests of further weights, which their receiver must hold already, by checkpoint name: the base of adapters. Of
    the kind that is fast on `device`."""

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

    def __iter__(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yield name and tensor."""
        yield from self.tensors
