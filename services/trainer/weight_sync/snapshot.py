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
from penstock.weights.named_weights import NamedWeights
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
    pending_digests: Mapping[str, Future[int]]
    """Digests by checkpoint name, computed in the background."""
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
        device: torch.device | None = None,
        kind: str | None = None,
    ) -> Self:
        """Copy weights, into memory of `pool` if given. Blocking: it reads every byte.

        Weights of one process are copied bucket by bucket: besides the copy, memory holds the tensors of only one
        bucket at a time, once as given and once packed. Those of several are written by them, into the host's memory.

        Args:
            version: Version of the weights.
            weights: The weights under their checkpoint names.
            max_bucket_bytes: See `Manifest.plan`.
            pool: Memory that other processes can open.
            device: Device of the copy; by default that of the weights.
            kind: Kind of the digests; by default the one that is fast on a GPU if weights or copy are on one.

        Raises:
            ValueError: a name occurs twice, or the weights differ from their announced specs.
        """
        manifest = Manifest.plan(weights.specs, max_bucket_bytes=max_bucket_bytes)
        if weights.write is not None:
            device = torch.device("cpu")
        device = device or weights.device
        packing = device if weights.device.type == "cpu" else weights.device
        kind = kind or digest_kind(packing)
        memory, parts = None, None
        if pool is not None or weights.write is not None:
            memory = (pool or SharedMemoryPool()).allocate(manifest.offsets(ALIGNMENT)[-1], device)
            parts = manifest.parts(memory.data, ALIGNMENT)
        with _Digests(kind, device if weights.write is not None else packing) as digests:
            if weights.write is None:
                parts = _copy(manifest, weights, packing=packing, device=device, outs=parts, digests=digests)
            else:
                assert memory is not None
                assert parts is not None
                weights.write(memory.message, manifest.tensor_offsets(ALIGNMENT))
                for bucket, part in zip(manifest.buckets, parts, strict=True):
                    digests.start(bucket, part)
        return cls(
            version=version,
            manifest=manifest,
            buckets=tuple(parts),
            shared_memory=None if pool is None else memory,
            digest_kind=kind,
            pending_digests=digests.pending,
            base_digests=weights.base_digests,
        )

    @property
    def digests(self) -> Mapping[str, int]:
        """Digests by checkpoint name. Blocks until they are computed."""
        return {name: pending.result() for name, pending in self.pending_digests.items()}

    def wait(self) -> None:
        """Block until all digests are computed."""
        for pending in self.pending_digests.values():
            pending.result()

    def differing_names(self, held: Mapping[str, int]) -> list[str]:
        """Return the parameters whose digest in `held` differs, or that only one side has. Blocking."""
        digests = {**self.base_digests, **self.digests}
        return sorted(name for name in digests.keys() | held.keys() if digests.get(name) != held.get(name))


class _Digests:
    """Computes digests in threads, which go on after the context."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self.pending: dict[str, Future[int]] = {}
        self._kind = kind
        self._threads = digest_pool(device)

    def start(self, bucket: Sequence[TensorSpec], data: torch.Tensor) -> None:
        """Compute those of a bucket's tensors."""
        for name, tensor in views(bucket, data).items():
            self.pending[name] = self._threads.submit(tensor_digest, tensor, self._kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False)


def _copy(
    manifest: Manifest,
    weights: NamedWeights,
    *,
    packing: torch.device,
    device: torch.device,
    outs: Sequence[torch.Tensor] | None,
    digests: _Digests,
) -> list[torch.Tensor]:
    """Pack buckets on one device and keep them on another, in `outs` if given; start their digests."""
    buckets: list[torch.Tensor] = []
    _synchronize(packing)  # the training thread may have written on another stream
    with closing(weights.__iter__()) as tensors:
        for number, bucket in enumerate(manifest.buckets):
            out = None if outs is None else outs[number]
            packed = _pack_next(bucket, tensors, packing, out=out if packing == device else None)
            _synchronize(packing)  # other threads and processes do not wait for this thread's stream
            digests.start(bucket, packed)
            if packing == device:
                buckets.append(packed)
                continue
            buckets.append(torch.empty_like(packed, device=device) if out is None else out)
            buckets[-1].copy_(packed)
            wait(digests.pending.values())  # they keep the packed bucket alive
            del packed
        if next(tensors, None) is not None:
            raise ValueError(f"more weights came than the {len(manifest.tensors)} that were announced")
    return buckets


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
