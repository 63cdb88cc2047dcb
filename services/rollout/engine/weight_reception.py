"""How the bytes of a push get into the parameters. Runs inside SGLang's scheduler process.

The next buckets are under way while one is loaded. A bucket that is one tensor is received in the very memory of its
parameter, which costs no copy at all; those of several small tensors go through a buffer.

SGLang's own loader may be the one that loads: then tensors are handed to it one by one.
"""

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from penstock.weights.delta import apply_deltas
from penstock.weights.manifest import TensorSpec, views
from penstock.weights.snapshot import snapshot_tensors
from services.rollout.engine.parameter_names import load_name
from services.rollout.engine.parameters import checkpoint_parameters

AHEAD = 4
"""Buckets that are under way at a time."""

_PREFIX = "penstock:"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """What the engine's process tells SGLang's scheduler beside names, dtypes and shapes, as its `load_format`."""

    bucket_lengths: tuple[int, ...]
    """Tensors in each bucket."""
    folder: str = ""
    """The snapshot to read; empty: the buckets come over the group."""
    is_delta: bool = False
    """Whether to read the snapshot's delta. It changes what is held, so it is always direct."""
    direct: bool
    """Whether to write into the parameters. Otherwise SGLang's loader does."""

    def to_load_format(self) -> str:
        """As text."""
        return _PREFIX + json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_load_format(cls, text: str | None) -> Self | None:
        """The inverse; None where it is some other load format."""
        if text is None or not text.startswith(_PREFIX):
            return None
        fields = json.loads(text.removeprefix(_PREFIX))
        return cls(**{**fields, "bucket_lengths": tuple(fields["bucket_lengths"])})

    def buckets(self, specs: Sequence[TensorSpec]) -> list[Sequence[TensorSpec]]:
        """The tensors, bucket by bucket."""
        found, first = [], 0
        for length in self.bucket_lengths:
            found.append(specs[first : first + length])
            first += length
        return found


def load(receive: Any, updater: Any, **request: Any) -> Any:
    """Around SGLang's `WeightUpdater.receive_weights_from_distributed`: returns what its loader is to load."""
    reception = Reception.from_load_format(request["load_format"])
    if reception is None:
        return receive(updater, **request)
    model, device = updater.get_model(), torch.device(updater.device)
    if not reception.direct:
        architecture = updater.model_config.hf_config.architectures[0]
        return (
            (load_name(name, architecture), tensor) for name, tensor in _tensors(reception, updater, request, device)
        )
    held = dict(checkpoint_parameters(model))
    if reception.is_delta:
        apply_deltas(held, Path(reception.folder))
    elif reception.folder:
        read_into(held, Path(reception.folder))
    else:
        receive_into(
            held, _buckets(reception, request), updater._model_update_group[request["group_name"]], device=device
        )
    return []


def receive_into(
    held: Mapping[str, torch.Tensor], buckets: Iterable[Sequence[TensorSpec]], group: Any, *, device: torch.device
) -> None:
    """Receive all buckets from rank 0 of `group`, each tensor into the one that is held under its name."""
    for name, tensor in _received(buckets, group, device=device, held=held):
        held[name].copy_(tensor)


def receive(
    buckets: Iterable[Sequence[TensorSpec]], group: Any, *, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive all buckets from rank 0 of `group`, and yield each tensor under its name; they may be kept."""
    yield from _received(buckets, group, device=device, held={})


def read_into(held: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read a snapshot, each tensor into the one that is held under its name."""
    for name, tensor in snapshot_tensors(folder):
        held[name].copy_(tensor)


def _tensors(
    reception: Reception, updater: Any, request: Mapping[str, Any], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    if reception.folder:
        return snapshot_tensors(Path(reception.folder))
    return receive(_buckets(reception, request), updater._model_update_group[request["group_name"]], device=device)


def _buckets(reception: Reception, request: Mapping[str, Any]) -> list[Sequence[TensorSpec]]:
    described = zip(request["names"], request["dtypes"], request["shapes"], strict=True)
    return reception.buckets(
        [TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in described]
    )


def _received(
    buckets: Iterable[Sequence[TensorSpec]], group: Any, *, device: torch.device, held: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive all buckets; yields those tensors that are not in their place yet."""
    under_way: collections.deque[tuple[Sequence[TensorSpec], torch.Tensor | None, Any]] = collections.deque()
    for bucket in buckets:
        target = _memory_of(held[bucket[0].name]) if len(bucket) == 1 and held else None
        buffer = None
        if target is None:
            target = buffer = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=device)
        under_way.append((bucket, buffer, dist.broadcast(target, src=0, group=group, async_op=True)))
        if len(under_way) > AHEAD:
            yield from _arrived(*under_way.popleft())
    while under_way:
        yield from _arrived(*under_way.popleft())


def _arrived(
    bucket: Sequence[TensorSpec], buffer: torch.Tensor | None, work: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    work.wait()
    if buffer is not None:
        yield from views(bucket, buffer).items()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's bytes, uint8[bytes], if they lie end to end."""
    return tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() and tensor.numel() else None
