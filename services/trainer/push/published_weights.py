"""A snapshot of the policy, ready to be pushed at any time while training goes on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from penstock.weights.digest import tensor_digest
from penstock.weights.manifest import Manifest, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A snapshot of the policy: what replicas of this version hold, byte for byte."""

    version: int
    manifest: Manifest
    buckets: tuple[torch.Tensor, ...]
    """uint8[bytes] each, in the manifest's order."""
    digests: Mapping[str, int]
    """Checkpoint name to digest."""

    @classmethod
    def take(
        cls, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, max_bucket_bytes: int
    ) -> "PublishedWeights":
        """Copy `tensors` (checkpoint name, tensor). Blocking: it reads every byte."""
        named = dict(tensors)
        manifest = Manifest.plan(named.items(), max_bucket_bytes=max_bucket_bytes)
        return cls(
            version=version,
            manifest=manifest,
            buckets=tuple(pack(bucket, named) for bucket in manifest.buckets),
            digests={name: tensor_digest(tensor) for name, tensor in named.items()},
        )

    def differing_names(self, held: Mapping[str, int]) -> list[str]:
        """Parameters whose digest in `held` is another, or that only one side has."""
        names = self.digests.keys() | held.keys()
        return sorted(name for name in names if self.digests.get(name) != held.get(name))
