"""Reads weight files in a folder that this engine can reach."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest
from penstock.weights.weight_files import check_weight_files, read_weight_files
from services.rollout.engine.sglang_plugin.transports.destination import Destination


class DiskTransport(msgspec.Struct, frozen=True, kw_only=True, tag="disk"):
    """The weight files of one version."""

    name = "disk"
    folder: str

    @classmethod
    def accept(cls, source: rollout_pb2.DiskSource, version: int, manifest: Manifest) -> Self:
        """Check that the files can be read here. Blocking.

        Raises:
            NotReadyError: they cannot be read, or contain other weights.
        """
        check_weight_files(Path(source.folder), version, manifest)
        return cls(folder=source.folder)

    def arrivals(
        self, manifest: Manifest, destination: Destination, groups: Mapping[str, Any]
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield all tensors, one by one."""
        yield from read_weight_files(Path(self.folder))
