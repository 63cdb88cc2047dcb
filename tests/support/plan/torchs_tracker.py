"""torch's own tracker of memory, against which `penstock plan` is compared."""

import unittest.mock
from collections.abc import Callable, Iterable
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._mode_utils import no_dispatch

from services.plan import working_memory
from services.plan.live_bytes import LiveBytes


def tracking_beside(monkeypatch: pytest.MonkeyPatch) -> MemTracker:
    """A tracker that sees what `working_bytes` counts in its next pass."""
    tracker = MemTracker()

    class BesideTracker(LiveBytes):
        """Counts what the tracker counts."""

        def leave_out(self, tensor: torch.Tensor) -> None:
            super().leave_out(tensor)
            tracker.track_external(tensor)

        def __enter__(self) -> Self:
            super().__enter__()
            tracker.__enter__()
            return self

        def __exit__(self, *raised: object) -> None:
            tracker.__exit__(*raised)
            super().__exit__(*raised)

    monkeypatch.setattr(working_memory, "LiveBytes", BesideTracker)
    return tracker


def beside_weights(tracker: MemTracker) -> int:
    """The most bytes at a time that it has seen, without parameters and buffers."""
    (found,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {getattr(kind, "value", kind): size for kind, size in found.items()}
    return int(sizes["Total"] - sizes["Parameter"] - sizes["Buffer"])


def peak_beside(held: Iterable[torch.Tensor], work: Callable[[], object]) -> tuple[int, int]:
    """The bytes of what is held, and the most bytes at a time beside it that exist while `work` runs.

    The copy is left out that gloo makes of what it reduces; NCCL makes none.

    Args:
        held: All tensors from before that `work` uses and that count.
        work: What to watch.
    """
    tracker = _Peak()
    tracker.track_external(*held)
    before = _total(tracker.get_tracker_snapshot())
    reduce_scatter = dist.reduce_scatter_single

    def unseen(*args: Any, **settings: Any) -> Any:
        with no_dispatch():
            return reduce_scatter(*args, **settings)

    with unittest.mock.patch.object(dist, "reduce_scatter_single", unseen), tracker:
        work()
    return before, _total(tracker.get_tracker_snapshot("peak")) - before


class _Peak(MemTracker):  # type: ignore[misc]  # torch is untyped here
    """Without numbers of each module: for those it may run only once, and everything that it takes needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()


class _NoModules:
    """Stands in for torch's `ModTracker`."""

    is_bw = False
    parents = frozenset[str]()

    def register_user_hooks(self, *_: object) -> None:
        pass

    def clear_user_hooks(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return sum(sizes["Total"] for sizes in snapshot.values())
