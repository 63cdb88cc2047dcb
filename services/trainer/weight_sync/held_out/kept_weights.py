"""The weights of an evaluation's version on disk, for a replica that needs them after others were published.

Invariant: they are complete or absent, even if the trainer is killed. They stay until the evaluation has ended.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError

from penstock.errors import SetupError
from penstock.weights.named_weights import NamedWeights
from penstock.weights.shared_memory import SharedMemoryPool
from penstock.weights.weight_files import find_weight_files, read_weight_files, write_weight_files
from services.trainer.weight_sync.snapshot import WeightSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """Weight files of one version."""

    version: int
    folder: Path

    @classmethod
    def write(cls, parent: Path, weights: WeightSnapshot) -> Self:
        """Write `weights` below `parent`, which holds nothing else. Blocking.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        folder = write_weight_files(parent, weights.version, weights.manifest, weights.buckets)
        return cls(version=weights.version, folder=folder)

    @classmethod
    def find(cls, parent: Path) -> Self | None:
        """Return the weights kept below `parent`; None if there are none, or they are incomplete. Blocking."""
        newest = find_weight_files(parent)
        return None if newest is None else cls(version=newest[0], folder=newest[1])

    def load(
        self, *, device: torch.device, kind: str, max_bucket_bytes: int, pool: SharedMemoryPool | None
    ) -> WeightSnapshot:
        """Read the weights, in the order in which they were written. Blocking.

        The device holds one copy of them, as for a publication.

        Args:
            device: Device of the snapshot.
            kind: Kind of the digests.
            max_bucket_bytes: As for the snapshot that was written.
            pool: Shared memory for the weights, if other processes must open them.

        Raises:
            SetupError: the files can no longer be read.
        """
        try:
            tensors = dict(read_weight_files(self.folder))  # memory-mapped, not read
        except (OSError, SafetensorError) as error:
            raise SetupError(
                f"{self.folder} held the weights of policy version {self.version}, which an evaluation plays, and "
                f"cannot be read: {error}; restore it, or remove it and start again without this evaluation"
            ) from None
        return WeightSnapshot.take(
            self.version,
            NamedWeights.of(tensors),
            max_bucket_bytes=max_bucket_bytes,
            pool=pool,
            device=torch.empty(0, device=device).device,  # with its index
            kind=kind,
        )


def remove_kept(parent: Path) -> None:
    """Remove the weights kept below `parent`, complete or not. Blocking."""
    shutil.rmtree(parent, ignore_errors=True)
