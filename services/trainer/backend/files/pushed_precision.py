"""In which precision weights are pushed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

from penstock.model.families.linear_attention import is_kept_in_float32


@dataclass(frozen=True, slots=True)
class PushedPrecision:
    """The precision of one weight. An engine receives the very numbers that the trainer computes with."""

    computed: torch.dtype
    """The trainer rounds the weight to it."""
    written: torch.dtype
    """The engine holds it in this one, which is no narrower."""

    @classmethod
    def of(cls, name: str, model_type: str, computed: torch.dtype) -> Self:
        """Return the precision of the weight with this own name in models of this type."""
        return cls(computed, torch.float32 if is_kept_in_float32(name, model_type) else computed)

    @property
    def written_name(self) -> str:
        """The name of the dtype in a push."""
        return str(self.written).removeprefix("torch.")

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as it is pushed."""
        return weight.to(self.computed).to(self.written)


def precisions(names: Iterable[str], model_type: str, computed: torch.dtype) -> dict[str, PushedPrecision]:
    """Return the precision of each weight, by its own name."""
    return {name: PushedPrecision.of(name, model_type, computed) for name in names}
