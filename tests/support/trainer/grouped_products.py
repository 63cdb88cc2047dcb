"""Counts the grouped products by which a backend computes all experts of a layer at once."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.backend.in_process import InProcessBackend


class _Counter(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += function is torch.ops.aten._grouped_mm.default
        return function(*args, **(kwargs or {}))


def count_grouped_products(backend: InProcessBackend) -> list[int]:
    """Return a list that gets the number of grouped products in each forward pass of the policy from now on."""
    compute, counts = backend._parts.passes.model, list[int]()

    def counted(row: Any) -> Any:
        with _Counter() as counter:
            said = compute(row)
        counts.append(counter.num_products)
        return said

    object.__setattr__(backend._parts.passes, "model", counted)
    return counts
