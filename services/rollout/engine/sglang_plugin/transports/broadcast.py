"""Receives buckets from rank 0 of a torch.distributed process group that this engine has joined."""

import collections
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    """The process group of a push."""

    name = "broadcast"
    group_name: str
    chunk_bytes: int
    """Larger buckets arrive in parts of this size; 0: buckets are not divided."""

    @classmethod
    def accept(cls, source: rollout_pb2.BroadcastSource, *, num_ranks: int) -> Self:
        """Check a process group that all processes of this engine will join.

        Raises:
            InvalidRequestError: its ranks or sizes are impossible.
        """
        if not source.group_name or source.rank_offset < 1 or source.world_size < source.rank_offset + num_ranks:
            raise InvalidRequestError(
                f"broadcast: group_name = {source.group_name!r} with rank_offset = {source.rank_offset} and "
                f"world_size = {source.world_size} is not a group whose rank 0 is the trainer and which has "
                f"{num_ranks} ranks from that on for this engine; run the same version of Penstock in both"
            )
        if source.chunk_bytes < 0:
            raise InvalidRequestError(f"broadcast: chunk_bytes = {source.chunk_bytes} must be 0 or greater")
        return cls(group_name=source.group_name, chunk_bytes=source.chunk_bytes)

    def arrivals(
        self, manifest: Manifest, destination: Destination, groups: Mapping[str, Any]
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Yield all tensors that were not received in place, as they arrive. `groups`: process groups by name.

        A member that fails, or whose iteration ends early, still receives everything that is sent: otherwise the
        trainer and the other members would wait for it until their timeout.
        """
        broadcast = _Broadcast(groups[self.group_name])
        try:
            yield from self._received(broadcast, manifest, destination)
        except BaseException:
            broadcast.take_rest(self._part_sizes(manifest), destination.device)
            raise

    def _received(
        self, broadcast: "_Broadcast", manifest: Manifest, destination: Destination
    ) -> Iterator[tuple[str, torch.Tensor]]:
        in_flight: collections.deque[tuple[Any, Sequence[TensorSpec], torch.Tensor]] = collections.deque()
        for bucket in manifest.buckets:
            target, in_place = destination.of_bucket(bucket)
            parts = chunks(target, self.chunk_bytes)
            for number, part in enumerate(parts, start=1):
                completes = number == len(parts) and not in_place
                in_flight.append((broadcast.start(part), bucket if completes else (), target))
                if len(in_flight) > _AHEAD:
                    yield from _completed(broadcast, *in_flight.popleft())
        while in_flight:
            yield from _completed(broadcast, *in_flight.popleft())

    def _part_sizes(self, manifest: Manifest) -> Iterator[int]:
        for bucket in manifest.buckets:
            without_memory = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device="meta")
            yield from (part.numel() for part in chunks(without_memory, self.chunk_bytes))


class _Broadcast:
    """The broadcasts of a push, part after part, as this member receives them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._num_started = 0
        self._is_over = False
        """Whether the group has failed, so that nothing more can be received."""

    def start(self, part: torch.Tensor) -> Any:
        """Start to receive a part, uint8[bytes], while others are in flight."""
        self._num_started += 1
        self._is_over = True
        work = dist.broadcast(part, src=0, group=self._group, async_op=True)
        self._is_over = False
        return work

    def wait(self, work: Any) -> None:
        """Wait for a part."""
        self._is_over = True
        work.wait()
        self._is_over = False

    def take_rest(self, part_sizes: Iterable[int], device: torch.device) -> None:
        """Receive and drop the parts that were not started; `part_sizes` lists all parts."""
        memory = torch.empty(0, dtype=torch.uint8, device=device)
        with suppress(RuntimeError):  # the group failed, or there is no memory at all
            for size in itertools.islice(part_sizes, self._num_started, None):
                if self._is_over:
                    return
                if memory.numel() < size:
                    memory = torch.empty(size, dtype=torch.uint8, device=device)
                self.wait(self.start(memory[:size]))


def _completed(
    broadcast: _Broadcast, work: Any, specs: Sequence[TensorSpec], target: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Wait for a part, and yield the tensors that it completes."""
    broadcast.wait(work)
    if specs:
        yield from views(specs, target).items()
