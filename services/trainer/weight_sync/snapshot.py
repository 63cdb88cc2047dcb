"""A copy of the policy's weights in memory, which can be pushed at any time while training continues."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import Self

import torch

from penstock.weights.digest import digest_kind, digest_pool, tensor_digest
from penstock.weights.manifest import Manifest, TensorSpec, pack, views
from penstock.weights.named_weights import NamedWeights, WriteWeights
from penstock.weights.shared_memory import ALIGNMENT, SharedMemory, SharedMemoryPool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSnapshot:
    """The weights of one version, byte for byte as its replicas hold them."""

    version: int
    manifest: Manifest
    buckets: tuple[torch.Tensor, ...]
    """uint8[bytes] each, in the manifest's order."""
    shared_memory: SharedMemory | None
    """The memory that contains the buckets, if other processes on this machine can open it."""
    digest_kind: str
    """See `penstock.weights.digest`."""
    pending_digests: Sequence[Future[dict[str, int]]]
    """Digests by checkpoint name of each bucket, computed in the background."""
    base_digests: Mapping[str, int] = field(default_factory=dict)
    """Digests of weights that a replica must hold already, because only their adapters are pushed."""

    @classmethod
    def take(
        cls,
        version: int,
        weights: NamedWeights,
        *,
        max_bucket_bytes: int,
        pool: SharedMemoryPool | None = None,
        is_offered: bool = True,
        device: torch.device | None = None,
        kind: str | None = None,
    ) -> Self:
        """Copy weights, into memory of `pool` if given. Blocking: it reads every byte.

        Weights of one process are copied bucket by bucket: besides the copy, memory holds the tensors of only one
        bucket at a time, once as given and once packed. Those of several are written by them, into the host's memory,
        where threads of this process compute the digests.

        Args:
            version: Version of the weights.
            weights: The weights under their checkpoint names.
            max_bucket_bytes: See `Manifest.plan`.
            pool: Memory that other processes can open, which is used again.
            is_offered: Whether replicas may open the pool's memory.
            device: Device of the copy; by default that of the weights.
            kind: Kind of the digests; by default the one that is fast on a GPU if weights or copy are on one.

        Raises:
            ValueError: a name occurs twice, the weights differ from their announced specs, or several processes have
                no `pool` to write to.
        """
        manifest = Manifest.plan(weights.specs, max_bucket_bytes=max_bucket_bytes)
        if weights.write is not None:
            device = torch.device("cpu")
        device = device or weights.device
        packing = device if weights.device.type == "cpu" else weights.device
        kind = kind or digest_kind(packing)
        memory = None if pool is None else pool.allocate(manifest.offsets(ALIGNMENT)[-1], device)
        if weights.write is None:
            buckets, digests = _copied(manifest, weights, memory, kind, packing=packing, device=device)
        else:
            if memory is None:
                raise ValueError("weights that several processes write need memory that these can open")
            buckets, digests = _written(manifest, weights.write, memory, kind)
        return cls(
            version=version,
            manifest=manifest,
            buckets=tuple(buckets),
            shared_memory=memory if is_offered else None,
            digest_kind=kind,
            pending_digests=digests,
            base_digests=weights.base_digests,
        )

    @property
    def proof(self) -> Mapping[str, int]:
        """Digest of all that a replica must hold, the base of adapters too, by name. Blocks until they are computed."""
        return {**self.base_digests, **self.digests}

    @property
    def digests(self) -> Mapping[str, int]:
        """Digests by checkpoint name. Blocks until they are computed."""
        return {name: digest for pending in self.pending_digests for name, digest in pending.result().items()}

    def wait(self) -> None:
        """Block until all digests are computed."""
        for pending in self.pending_digests:
            pending.result()


class _Digests:
    """Computes digests in threads, which go on after the context."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self.pending: list[Future[dict[str, int]]] = []
        self._kind = kind
        self._threads = digest_pool(device)

    def start(self, bucket: Sequence[TensorSpec], data: torch.Tensor) -> None:
        """Compute those of a bucket's tensors, together: a job for each small one would cost more than its digest."""
        self.pending.append(self._threads.submit(_digests_of, bucket, data, self._kind))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False)


def _digests_of(bucket: Sequence[TensorSpec], data: torch.Tensor, kind: str) -> dict[str, int]:
    return {name: tensor_digest(tensor, kind) for name, tensor in views(bucket, data).items()}


def _written(
    manifest: Manifest, write: WriteWeights, memory: SharedMemory, kind: str
) -> tuple[list[torch.Tensor], list[Future[dict[str, int]]]]:
    """Have several processes write all buckets into memory of the host; return them, and their digests."""
    write(memory.message, manifest.tensor_offsets(ALIGNMENT))
    buckets = manifest.bucket_views(memory.data, ALIGNMENT)
    with _Digests(kind, memory.data.device) as digests:
        for bucket, data in zip(manifest.buckets, buckets, strict=True):
            digests.start(bucket, data)
    return buckets, digests.pending


def _copied(
    manifest: Manifest,
    weights: NamedWeights,
    memory: SharedMemory | None,
    kind: str,
    *,
    packing: torch.device,
    device: torch.device,
) -> tuple[list[torch.Tensor], list[Future[dict[str, int]]]]:
    """Pack buckets on one device and keep them on another, in `memory` if given; return them, and their digests."""
    outs = [None] * len(manifest.buckets) if memory is None else manifest.bucket_views(memory.data, ALIGNMENT)
    buckets: list[torch.Tensor] = []
    _synchronize(packing)  # the training thread may have written on another stream
    with _Digests(kind, packing) as digests, closing(weights.__iter__()) as tensors:
        for bucket, out in zip(manifest.buckets, outs, strict=True):
            packed = _pack_next(bucket, tensors, packing, out=out if packing == device else None)
            _synchronize(packing)  # other threads and processes do not wait for this thread's stream
            digests.start(bucket, packed)
            if packing == device:
                buckets.append(packed)
                continue
            buckets.append(torch.empty_like(packed, device=device) if out is None else out)
            buckets[-1].copy_(packed)
            wait(digests.pending)  # they keep the packed bucket alive
            del packed
        if next(tensors, None) is not None:
            raise ValueError(f"more weights came than the {len(manifest.tensors)} that were announced")
    return buckets, digests.pending


def _pack_next(
    bucket: Sequence[TensorSpec],
    tensors: Iterator[tuple[str, torch.Tensor]],
    device: torch.device,
    *,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Pack the next tensors into a bucket; see `pack`."""
    named = dict(itertools.islice(tensors, len(bucket)))
    if tuple(named) != tuple(spec.name for spec in bucket):
        raise ValueError(f"weights {tuple(named)} came, {tuple(spec.name for spec in bucket)} were announced")
    return pack(bucket, {name: tensor.to(device) for name, tensor in named.items()}, out=out)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
