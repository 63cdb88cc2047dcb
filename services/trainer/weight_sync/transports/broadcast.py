"""Broadcast over a torch.distributed process group: NCCL between GPUs, gloo between CPUs."""

import uuid
from typing import Self

from penstock.v1 import rollout_pb2
from penstock.weights.manifest import chunks
from services.trainer.weight_sync.process_group import WeightProcessGroup
from services.trainer.weight_sync.push_calls import Member
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import CollectiveTransport


class BroadcastTransport(CollectiveTransport):
    """A process group of the trainer and some members. It is reused until the set of members changes."""

    name = "broadcast"

    def __init__(
        self, members: tuple[Member, ...], source: rollout_pb2.BroadcastSource, group: WeightProcessGroup
    ) -> None:
        """Use `open`."""
        self.members = members
        self._source = source
        self._group = group
        self._is_formed = False

    @classmethod
    def open(cls, members: tuple[Member, ...], *, host: str, backend: str, chunk_bytes: int) -> Self:
        """Open the rendezvous. Buckets larger than `chunk_bytes` are broadcast in parts. Blocking.

        Raises:
            SetupError: `host` is not an address of this machine.
        """
        name, world_size = f"weights-{uuid.uuid4().hex[:12]}", 1 + sum(member.num_ranks for member in members)
        group = WeightProcessGroup.listen(host=host, name=name, world_size=world_size, backend=backend)
        source = rollout_pb2.BroadcastSource(
            group_name=name,
            master_host=host,
            master_port=group.port,
            world_size=world_size,
            backend=backend,
            chunk_bytes=chunk_bytes,
        )
        return cls(members, source, group)

    @property
    def is_formed(self) -> bool:
        """Whether all members are connected."""
        return self._is_formed

    @property
    def is_closed(self) -> bool:
        """Whether the process group has ended."""
        return self._group.is_closed

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Announce the process group, and the member's first rank in it."""
        request.broadcast.CopyFrom(self._source)
        before = self.members[: self.members.index(member)]
        request.broadcast.rank_offset = 1 + sum(other.num_ranks for other in before)

    def form(self, *, timeout_s: float) -> None:
        """Wait for the members."""
        self._group.form(timeout_s=timeout_s)
        self._is_formed = True

    def send(self, weights: WeightSnapshot, *, timeout_s: float) -> None:
        """Broadcast all buckets."""
        parts = (part for bucket in weights.buckets for part in chunks(bucket, self._source.chunk_bytes))
        self._group.broadcast(parts, timeout_s=timeout_s)

    def close(self, *, are_coming: bool = False) -> None:
        """Leave the process group."""
        self._group.close(are_coming=are_coming)
