"""Reads compressed blocks that were uploaded to this engine before it paused."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.errors import NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights.delta import apply_blocks, read_blocks
from penstock.weights.manifest import Manifest
from services.rollout.engine.sglang_plugin.transports.destination import Destination


class DeltaTransport(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """A file of blocks."""

    name = "delta"
    path: str
    base_version: int
    """The version that the blocks change; 0: they contain all weights."""

    @staticmethod
    def require_base(source: rollout_pb2.DeltaSource, *, held: int, is_sound: bool, is_shared: bool) -> None:
        """Check that this engine holds the base in one process: version `held`, with sound weights if `is_sound`.

        Raises:
            NotReadyError: it holds other weights.
        """
        base_version = source.base_version
        if base_version and is_shared:
            raise NotReadyError(
                f"the delta changes version {base_version}, of which each process of this engine holds a shard; "
                "send all weights"
            )
        if base_version and (base_version != held or not is_sound):
            weights = f"version {held}" if is_sound else "broken weights"
            raise NotReadyError(
                f"the delta changes version {base_version}, but this engine holds {weights}; send all weights"
            )

    def arrivals(
        self, manifest: Manifest, destination: Destination, groups: Mapping[str, Any]
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield all tensors, or change the parameters in place and yield nothing if the destination holds all.

        Raises:
            ValueError: blocks are damaged.
        """
        with Path(self.path).open("rb") as file:
            if destination.holds_all:
                apply_blocks(file, manifest.tensors, destination.held, is_delta=self.base_version > 0)
            else:
                yield from read_blocks(file, manifest.tensors)
