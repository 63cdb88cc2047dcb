"""Reads weights from the memory of a trainer on this machine."""

from collections.abc import Generator, Mapping
from typing import Any, Self

import msgspec
import torch

from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest, views
from penstock.weights.shared_memory import ALIGNMENT, SharedMemoryHandle, open_shared_memory
from services.rollout.engine.sglang_plugin.transports.destination import Destination


class SharedMemoryTransport(msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory"):
    """The memory of one snapshot."""

    name = "shared_memory"
    handle: SharedMemoryHandle

    @classmethod
    def accept(cls, source: rollout_pb2.SharedMemorySource) -> Self:
        """Check that the memory can be opened here. Blocking.

        Raises:
            NotReadyError: it cannot be opened.
        """
        return cls(handle=SharedMemoryHandle.of(source))

    def arrivals(
        self, manifest: Manifest, destination: Destination, groups: Mapping[str, Any]
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield all tensors that were not read in place.

        Raises:
            NotReadyError: the memory was freed.
        """
        with open_shared_memory(self.handle) as reader:
            for bucket, first in zip(manifest.buckets, manifest.offsets(ALIGNMENT), strict=False):
                target, in_place = destination.of_bucket(bucket)
                reader.read(first, target)
                if not in_place:
                    yield from views(bucket, target).items()
