"""The processes that compute steps together, as one of them sees them.

Invariant: every rank calls the same methods in the same order. What `gather` returns is the same on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from services.trainer.backend.ranks.expert_groups import ExpertGroups

ValueT = TypeVar("ValueT")

_COMPUTING = timedelta(minutes=30)
"""The longest that ranks wait for each other inside a command: more than a row takes, or reading a checkpoint."""
_NEVER = timedelta(days=365)
"""For the next command they wait as long as a rollout takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of how many this process is."""

    rank: int = 0
    size: int = 1
    mesh: Any = None
    """torch's one-dimensional DeviceMesh of all ranks; None for a rank alone."""
    _values: Any = None
    """Group for what the ranks tell each other through the hosts' memory."""
    _commands: Any = None
    """Group for what rank 0 tells the others."""
    _expert_groups: dict[int, ExpertGroups] = field(default_factory=dict, compare=False)
    """Those that were formed, by their size."""

    @classmethod
    def join(cls, store: dist.Store, *, rank: int, size: int, device: torch.device) -> Self:
        """Form the group of all ranks, which share `store`. Blocks until the last one has come."""
        from torch.distributed.device_mesh import init_device_mesh

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_COMPUTING)
        return cls(
            rank=rank,
            size=size,
            mesh=init_device_mesh(device.type, (size,)),
            _values=dist.new_group(backend="gloo", timeout=_COMPUTING),
            _commands=dist.new_group(backend="gloo", timeout=_NEVER),
        )

    def expert_groups(self, size: int) -> ExpertGroups | None:
        """Return this rank's groups of expert parallelism; None if a rank owns all experts.

        Args:
            size: `trainer.expert_parallel`; it divides the number of ranks.
        """
        if size > 1 and size not in self._expert_groups:
            self._expert_groups[size] = ExpertGroups.form(
                size, rank=self.rank, num_ranks=self.size, device_type=self.mesh.device_type, timeout=_COMPUTING
            )
        return self._expert_groups.get(size)

    def gather(self, value: ValueT) -> list[ValueT]:
        """Return the value of every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._values)
        return values

    def in_order(self, parts: Sequence[tuple[int, ValueT]]) -> list[ValueT]:
        """Return the numbered parts of all ranks by their numbers."""
        if self.size == 1:
            return [part for _, part in parts]
        together = [each for of_rank in self.gather(list(parts)) for each in of_rank]
        return [part for _, part in sorted(together, key=lambda each: each[0])]

    def norm(self, of_shard: torch.Tensor) -> torch.Tensor:
        """Return the 2-norm of something of which each rank holds a shard, given that of this rank's shard."""
        if self.size == 1:
            return of_shard
        squares = [norm**2 for norm in self.gather(float(of_shard.double()))]
        return torch.tensor(sum(squares), dtype=torch.float64).sqrt().to(of_shard)

    def broadcast(self, value: Any) -> Any:
        """Return what rank 0 gives; what the others give is not looked at."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._commands)
        return values[0]


ALONE = Ranks()
