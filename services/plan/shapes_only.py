"""Tensors without memory: runs a model with the sizes of real tensors but without their values.

torch's fake tensors have only a shape and a precision, so they cannot decide the sizes of others. In a model that reads
pictures and packed rows, the tensors that decide sizes are small (grids, positions, masks, tables), so they are
computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

_SMALL = 20_000
"""Elements up to which a floating-point tensor is computed, if none of its inputs lacks values."""
_INDEXING = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
)


class ShapesOnly(FakeTensorMode):  # type: ignore[misc]  # torch is untyped here
    """Within this context, large floating-point tensors, and those made of them, have no memory."""

    def __init__(self) -> None:
        """Start with computing everything that can be computed."""
        super().__init__(allow_non_fake_inputs=True)
        self._computes = True

    @contextmanager
    def without_numbers(self) -> Iterator[None]:
        """Compute nothing in this context, however small, because a model's parameters must all be of one kind."""
        self._computes = False
        try:
            with self:
                yield
        finally:
            self._computes = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._computes and _is_computed(func, args, kwargs):
            return func(*args, **kwargs)
        if func in _INDEXING:
            args = (args[0], _with_numbers(args[1]), *args[2:])
        # Tensors that torch makes on the way to this result are treated alike.
        computes, self._computes = self._computes, False
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._computes = computes


def _is_computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    if tensors:
        return all(_is_small(tensor) for tensor in tensors)
    made = func(*args, **{**kwargs, "device": "meta"}) if "Device? device" in str(func._schema) else None
    return not isinstance(made, torch.Tensor) or _is_small(made)


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.numel() <= _SMALL


def _with_numbers(indices: Sequence[Any]) -> list[Any]:
    """Return indices in place of masks, whose number of true elements torch's fake tensors do not know."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
        found.extend(index.nonzero(as_tuple=True) if is_mask else [index])
    return found
