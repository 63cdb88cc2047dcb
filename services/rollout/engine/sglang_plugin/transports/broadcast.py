"""Buckets from rank 0 of a torch.distributed process group that this engine has joined."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist

from penstock.errors import InvalidRequestError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest, TensorSpec, chunks, views
from services.rollout.engine.sglang_plugin.transports.destination import Destination

_AHEAD = 4
"""Buckets, or parts of large ones, in flight at a time."""


class BroadcastTransport(msgspec.Struct, frozen=True, kw_only=True, tag="broadcast"):
    """A process group."""

    name = "broadcast"
    group_name: str
    chunk_bytes: int
    """Larger buckets arrive in parts of this size; 0: in one part."""

    @classmethod
    def accept(cls, source: rollout_pb2.BroadcastSource) -> Self:
        """Check a process group that is to be joined.

        Raises:
            InvalidRequestError: its ranks or sizes are impossible.
        """
        if not source.group_name or source.rank_offset < 1 or source.world_size <= source.rank_offset:
            raise InvalidRequestError(
                f"broadcast: group_name = {source.group_name!r} with rank_offset = {source.rank_offset} and "
                f"world_size = {source.world_size} is not a group whose rank 0 is the trainer"
            )
        if source.chunk_bytes < 0:
            raise InvalidRequestError(f"broadcast: chunk_bytes = {source.chunk_bytes} must be 0 or greater")
        return cls(group_name=source.group_name, chunk_bytes=source.chunk_bytes)

    def arrivals(
        self, manifest: Manifest, destination: Destination, groups: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that were not received in place, as they arrive. `groups`: process groups by name."""
        group = groups[self.group_name]
        in_flight: collections.deque[tuple[Any, Sequence[TensorSpec], torch.Tensor]] = collections.deque()
        for bucket in manifest.buckets:
            target, in_place = destination.of_bucket(bucket)
            parts = chunks(target, self.chunk_bytes)
            for number, part in enumerate(parts, start=1):
                work = dist.broadcast(part, src=0, group=group, async_op=True)
                completes = number == len(parts) and not in_place
                in_flight.append((work, bucket if completes else (), target))
                if len(in_flight) > _AHEAD:
                    yield from _awaited(*in_flight.popleft())
        while in_flight:
            yield from _awaited(*in_flight.popleft())


def _awaited(work: Any, completed: Sequence[TensorSpec], target: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wait for a part, and yield the tensors that it completes."""
    work.wait()
    if completed:
        yield from views(completed, target).items()
