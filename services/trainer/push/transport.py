"""How the bytes of a push travel: over a process group, or as files.

One interface for all, so that stages, deadlines and failures are the same whatever carries the weights.
"""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.v1 import rollout_pb2
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.stages import Member
from services.trainer.push.weight_group import WeightGroup


class Transport(Protocol):
    """What carries the weights to the members of one attempt. All methods but `announce` block."""

    @property
    def is_formed(self) -> bool:
        """Whether members are connected already; if not, `form` is called while they prepare."""

    @property
    def is_closed(self) -> bool:
        """Whether it is of no use any more."""

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Write into the request how this member gets the weights."""

    def form(self, *, timeout_s: float) -> None:
        """The trainer's part while members prepare."""

    def send(self, weights: PublishedWeights, *, timeout_s: float) -> None:
        """The trainer's part while members receive."""

    def close(self, *, num_coming: int = 0) -> None:
        """Let go of it, and of every member that waits in it; see `WeightGroup.close`."""


@dataclass(slots=True)
class Broadcast:
    """A torch.distributed group: NCCL between GPUs, gloo between CPUs. It lasts while membership does."""

    members: tuple[Member, ...]
    message: rollout_pb2.WeightGroup
    group: WeightGroup
    is_formed: bool = False

    @classmethod
    def open(cls, members: tuple[Member, ...], *, host: str, backend: str) -> "Broadcast":
        """Open the rendezvous. Blocking.

        Raises:
            SetupError: this machine cannot be reached at `host`.
        """
        name, world_size = f"epoch-{uuid.uuid4().hex[:12]}", 1 + len(members)
        group = WeightGroup.listen(host=host, name=name, world_size=world_size, backend=backend)
        message = rollout_pb2.WeightGroup(
            name=name, master_host=host, master_port=group.port, world_size=world_size, backend=backend
        )
        return cls(members, message, group)

    @property
    def is_closed(self) -> bool:
        """Whether the group has ended."""
        return self.group.is_closed

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """The group, and the member's rank in it."""
        request.group.CopyFrom(self.message)
        request.group.rank_offset = 1 + self.members.index(member)

    def form(self, *, timeout_s: float) -> None:
        """Meet the members."""
        self.group.form(timeout_s=timeout_s)
        self.is_formed = True

    def send(self, weights: PublishedWeights, *, timeout_s: float) -> None:
        """Send all buckets."""
        self.group.broadcast(weights.buckets, timeout_s=timeout_s)

    def close(self, *, num_coming: int = 0) -> None:
        """Leave the group."""
        self.group.close(num_coming=num_coming)


@dataclass(frozen=True, slots=True)
class Disk:
    """A snapshot that members read by themselves."""

    folder: Path
    base_version: int = 0
    """That of the members, if they are to read the delta against it."""

    is_formed = True
    is_closed = False

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """The folder."""
        request.snapshot.folder = str(self.folder)
        request.snapshot.base_version = self.base_version

    def form(self, *, timeout_s: float) -> None:
        """There is nobody to meet."""

    def send(self, weights: PublishedWeights, *, timeout_s: float) -> None:
        """It is written already."""

    def close(self, *, num_coming: int = 0) -> None:
        """The folder stays for others."""
