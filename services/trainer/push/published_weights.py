"""A snapshot of the policy, ready to be pushed at any time while training goes on."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import torch

from penstock.weights.digest import digest_kind, tensor_digests
from penstock.weights.manifest import Manifest, pack, views
from penstock.weights.segment import ALIGNMENT, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A snapshot of the policy: what replicas of this version hold, byte for byte."""

    version: int
    manifest: Manifest
    buckets: tuple[torch.Tensor, ...]
    """uint8[bytes] each, in the manifest's order."""
    segment: Segment | None
    """The memory of which the buckets are parts, where other processes of this machine can read it."""
    digest_kind: str
    """See `penstock.weights.digest`."""
    pending_digests: Future[dict[str, int]]
    """Computed in the background."""

    @classmethod
    def take(
        cls,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        max_bucket_bytes: int,
        shared: bool = False,
    ) -> Self:
        """Copy `tensors` (checkpoint name, tensor); if `shared`, into a segment. Blocking: it reads every byte.

        Raises:
            ValueError: a name comes twice, or one tensor under two names.
        """
        named = dict(tensors)
        owners: dict[int, str] = {}
        for name, tensor in named.items():
            if tensor.numel() and (other := owners.setdefault(tensor.data_ptr(), name)) != name:
                raise ValueError(f"{name} and {other} are one tensor; push tied parameters once")
        manifest = Manifest.plan(named.items(), max_bucket_bytes=max_bucket_bytes)
        device = next(iter(named.values())).device
        segment = None
        _finish_work(device)  # of the thread that has trained, whatever its stream
        if shared:
            *firsts, size_bytes = manifest.offsets(ALIGNMENT)
            segment = Segment.create(size_bytes, device)
            buckets = tuple(
                pack(bucket, named, out=segment.data[first : first + sum(spec.num_bytes for spec in bucket)])
                for bucket, first in zip(manifest.buckets, firsts, strict=True)
            )
        else:
            buckets = tuple(pack(bucket, named) for bucket in manifest.buckets)
        _finish_work(device)  # other threads, and processes, read it without knowing of this thread's stream
        copied: dict[str, torch.Tensor] = {}
        for specs, data in zip(manifest.buckets, buckets, strict=True):
            copied |= views(specs, data)
        kind = digest_kind(device)
        pool = ThreadPoolExecutor(1)
        pending = pool.submit(tensor_digests, copied.items(), kind)
        pool.shutdown(wait=False)
        return cls(
            version=version,
            manifest=manifest,
            buckets=buckets,
            segment=segment,
            digest_kind=kind,
            pending_digests=pending,
        )

    @property
    def digests(self) -> Mapping[str, int]:
        """Checkpoint name to digest. Blocking until they are computed."""
        return self.pending_digests.result()

    def wait(self) -> None:
        """Wait until it can be pushed without further work."""
        self.pending_digests.result()

    def differing_names(self, held: Mapping[str, int]) -> list[str]:
        """Parameters whose digest in `held` is another, or that only one side has. Blocking."""
        digests = self.digests
        return sorted(name for name in digests.keys() | held.keys() if digests.get(name) != held.get(name))


def _finish_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
