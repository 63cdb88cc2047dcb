"""torch's own tracker of memory, which counts beside `penstock plan`'s."""

from typing import Self

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

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
