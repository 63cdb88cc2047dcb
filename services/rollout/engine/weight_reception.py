"""How the bytes of a push get into the parameters. Runs inside SGLang's scheduler process.

The next buckets are under way while one is loaded. A bucket that is one tensor is received in the very memory of its
parameter, which costs no copy at all; those of several small tensors go through a buffer.

SGLang's own loader may be the one that loads: then tensors are handed to it one by one.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from penstock.weights.delta import apply_pieces, read_pieces
from penstock.weights.manifest import Manifest, TensorSpec, chunks, views
from penstock.weights.segment import ALIGNMENT, SegmentSource, open_segment
from penstock.weights.snapshot import snapshot_tensors
from services.rollout.engine.parameter_names import load_name
from services.rollout.engine.parameters import checkpoint_parameters
from services.rollout.engine.weight_source import Source

AHEAD = 4
"""Buckets, or parts of large ones, that are under way at a time."""

_PREFIX = "penstock:"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """What the engine's process tells SGLang's scheduler beside names, dtypes and shapes, as its `load_format`."""

    bucket_lengths: tuple[int, ...]
    """Tensors in each bucket."""
    source: Source
    direct: bool
    """Whether to write into the parameters. Otherwise SGLang's loader does."""

    def to_load_format(self) -> str:
        """As text."""
        fields = [self.bucket_lengths, self.source.to_json(), self.direct]
        return _PREFIX + json.dumps(fields)

    @classmethod
    def from_load_format(cls, text: str | None) -> Self | None:
        """The inverse; None where it is some other load format."""
        if text is None or not text.startswith(_PREFIX):
            return None
        lengths, source, direct = json.loads(text.removeprefix(_PREFIX))
        return cls(bucket_lengths=tuple(lengths), source=Source.from_json(source), direct=direct)

    def manifest(self, specs: Sequence[TensorSpec]) -> Manifest:
        """The tensors, bucket by bucket."""
        left = iter(specs)
        return Manifest(tuple(tuple(itertools.islice(left, length)) for length in self.bucket_lengths))


def load(receive: Any, updater: Any, **request: Any) -> Any:
    """Around SGLang's `WeightUpdater.receive_weights_from_distributed`: returns what its loader is to load."""
    reception = Reception.from_load_format(request["load_format"])
    if reception is None:
        return receive(updater, **request)
    model, device = updater.get_model(), torch.device(updater.device)
    described = zip(request["names"], request["dtypes"], request["shapes"], strict=True)
    manifest = reception.manifest(
        [TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in described]
    )
    group = updater._model_update_group[request["group_name"]] if reception.source.group_name else None
    if reception.direct:
        take_into(dict(checkpoint_parameters(model)), manifest, reception.source, group)
        return []
    architecture = updater.model_config.hf_config.architectures[0]
    arrivals = _arrivals(manifest, reception.source, group, device=device, held={})
    return ((load_name(name, architecture), tensor) for name, tensor in arrivals)


def take_into(held: Mapping[str, torch.Tensor], manifest: Manifest, source: Source, group: Any) -> None:
    """Take each tensor into the one that is held under its name.

    Raises:
        NotReadyError: the segment is gone.
        ValueError: pieces are damaged.
    """
    device = next(iter(held.values())).device
    for name, tensor in _arrivals(manifest, source, group, device=device, held=held):
        held[name].copy_(tensor)


def _arrivals(
    manifest: Manifest, source: Source, group: Any, *, device: torch.device, held: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, as they come, under their names, but for those that went straight into the one that is held."""
    if source.folder:
        yield from snapshot_tensors(Path(source.folder))
    elif source.pieces:
        with Path(source.pieces).open("rb") as file:
            if held:
                apply_pieces(file, manifest.tensors, held, is_delta=source.is_delta)
            else:
                yield from read_pieces(file, manifest.tensors)
    elif source.segment is not None:
        yield from _read(manifest, source.segment, device=device, held=held)
    else:
        yield from _received(manifest, source, group, device=device, held=held)


def _read(
    manifest: Manifest, source: SegmentSource, *, device: torch.device, held: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    with open_segment(source) as reader:
        for bucket, first in zip(manifest.buckets, manifest.offsets(ALIGNMENT), strict=False):
            target, in_place = _target(bucket, held, device)
            reader.read(first, target)
            if not in_place:
                yield from views(bucket, target).items()


def _received(
    manifest: Manifest, source: Source, group: Any, *, device: torch.device, held: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All buckets, from rank 0 of `group`."""
    under_way: collections.deque[tuple[Any, Sequence[TensorSpec], torch.Tensor]] = collections.deque()
    for bucket in manifest.buckets:
        target, in_place = _target(bucket, held, device)
        parts = chunks(target, source.chunk_bytes)
        for number, part in enumerate(parts, start=1):
            work = dist.broadcast(part, src=0, group=group, async_op=True)
            completes = number == len(parts) and not in_place
            under_way.append((work, bucket if completes else (), target))
            if len(under_way) > AHEAD:
                yield from _awaited(*under_way.popleft())
    while under_way:
        yield from _awaited(*under_way.popleft())


def _awaited(work: Any, tensors: Sequence[TensorSpec], target: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wait for a part, and return what is complete with it and still to be put in its place."""
    work.wait()
    if tensors:
        yield from views(tensors, target).items()


def _target(
    bucket: Sequence[TensorSpec], held: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, bool]:
    """Where a bucket's bytes go, uint8[bytes], and whether that is where they belong."""
    if len(bucket) == 1 and held:
        tensor = held[bucket[0].name]
        if tensor.is_contiguous() and tensor.numel():
            return tensor.view(-1).view(torch.uint8), True
    return torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=device), False
