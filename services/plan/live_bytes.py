"""Counts the bytes of tensors alive at a time, and the most of each phase.

torch's own tracker (`MemTracker`) counts the same number of bytes, but only for the whole pass, and takes about twice
as long.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_BLOCK_BYTES = 512
"""CUDA's caching allocator rounds sizes up to a multiple of this many bytes."""


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Counts the memory of tensors made in this context, for as long as they live."""

    def __init__(self) -> None:
        """Count from 0."""
        super().__init__()
        self.peaks = [0]
        """The most bytes at a time between one `mark` and the next."""
        self._live = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def now(self) -> int:
        """The bytes at this time."""
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return max(self.peaks)

    def mark(self) -> None:
        """Start another peak."""
        self.peaks.append(self._live)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Exclude a tensor that existed before, although the context may make views of it."""
        self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._known.add(storage)
        self._live += size
        self.peaks[-1] = max(self.peaks[-1], self._live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self._live -= size
