"""A copy of the policy's weights in memory, which can be pushed at any time while training continues."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import torch

from penstock.weights.digest import digest_kind, digest_pool, tensor_digest
from penstock.weights.manifest import Manifest, TensorSpec, pack, views
from penstock.weights.shared_memory import ALIGNMENT, SharedMemory, SharedMemoryPool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSnapshot:
    """The weights of one version: what replicas of this version hold, byte for byte."""

    version: int
    manifest: Manifest
    buckets: tuple[torch.Tensor, ...]
    """uint8[bytes] each, in the manifest's order."""
    shared_memory: SharedMemory | None
    """The memory that contains the buckets, if other processes of this machine can open it."""
    digest_kind: str
    """See `penstock.weights.digest`."""
    pending_digests: Mapping[str, Future[int]]
    """By checkpoint name; computed in the background."""

    @classmethod
    def take(
        cls,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        max_bucket_bytes: int,
        pool: SharedMemoryPool | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Copy `tensors` (checkpoint name, tensor), into memory of `pool` if given. Blocking: it reads every byte.

        The copy is on `device`, by default that of the tensors. Tensors of another device are moved there bucket by
        bucket, so that the device has the copy and one bucket more at most.

        Raises:
            ValueError: a name occurs twice, or one tensor has two names.
        """
        named = dict(tensors)
        owners: dict[int, str] = {}
        for name, tensor in named.items():
            if tensor.numel() and (other := owners.setdefault(tensor.data_ptr(), name)) != name:
                raise ValueError(f"{name} and {other} are one tensor; push tied parameters once")
        manifest = Manifest.plan(named.items(), max_bucket_bytes=max_bucket_bytes)
        device = device or next(iter(named.values())).device
        kind = digest_kind(device)
        memory, outs = None, [None] * len(manifest.buckets)
        if pool is not None:
            *firsts, size_bytes = manifest.offsets(ALIGNMENT)
            memory = pool.allocate(size_bytes, device)
            outs = [
                memory.data[first : first + sum(spec.num_bytes for spec in bucket)]
                for bucket, first in zip(manifest.buckets, firsts, strict=True)
            ]
        buckets: list[torch.Tensor] = []
        pending: dict[str, Future[int]] = {}
        threads = digest_pool(device)

        def start_digests(bucket: Sequence[TensorSpec], data: torch.Tensor) -> None:
            pending.update(
                (name, threads.submit(tensor_digest, tensor, kind)) for name, tensor in views(bucket, data).items()
            )

        try:
            _synchronize(device)  # the training thread may have written on another stream
            for bucket, out in zip(manifest.buckets, outs, strict=True):
                moved = {spec.name: named[spec.name].to(device) for spec in bucket}
                buckets.append(pack(bucket, moved, out=out))
                del moved  # before the next bucket is moved
                if device.type == "cpu":  # while the bytes are in the cache
                    start_digests(bucket, buckets[-1])
            if device.type != "cpu":
                _synchronize(device)  # other threads and processes do not wait for this thread's stream
                for bucket, data in zip(manifest.buckets, buckets, strict=True):
                    start_digests(bucket, data)
        finally:
            threads.shutdown(wait=False)
        return cls(
            version=version,
            manifest=manifest,
            buckets=tuple(buckets),
            shared_memory=memory,
            digest_kind=kind,
            pending_digests=pending,
        )

    @property
    def digests(self) -> Mapping[str, int]:
        """Digest by checkpoint name. Blocks until they are computed."""
        return {name: pending.result() for name, pending in self.pending_digests.items()}

    def wait(self) -> None:
        """Block until all digests are computed."""
        for pending in self.pending_digests.values():
            pending.result()

    def differing_names(self, held: Mapping[str, int]) -> list[str]:
        """Parameters whose digest in `held` differs, or that only one side has. Blocking."""
        digests = self.digests
        return sorted(name for name in digests.keys() | held.keys() if digests.get(name) != held.get(name))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
