"""Expert parallelism: which rank owns which experts of every layer.

With 4 ranks, `expert_parallel` = 2 and 6 experts, the owners are

    rank          0      1      2      3
    experts      0-2    3-5    0-2    3-5

Neighbours exchange tokens, so exchanges stay inside a machine where they can. Ranks that own the same experts hold
shards of them, as all ranks hold shards of everything else.

Legend: E = experts of a layer, O = those that one rank owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertGroups:
    """This rank's groups: those that it exchanges tokens with, and those that own the same experts."""

    size: int
    """Ranks among which the experts of a layer are divided."""
    number: int
    """This rank's place among them; it owns the experts from O * number on."""
    exchange: Any
    """torch's process group of these ranks, in the order of their experts."""
    mesh: DeviceMesh
    """The ranks that own the same experts, each of which holds a shard."""

    @classmethod
    def form(cls, size: int, *, rank: int, num_ranks: int, device_type: str, timeout: timedelta) -> Self:
        """Form the groups of all ranks, which must call this together.

        Args:
            size: `trainer.expert_parallel`; it divides `num_ranks`.
            rank: This rank.
            num_ranks: All ranks.
            device_type: cpu or cuda.
            timeout: The longest that a rank waits for the others of a group.
        """
        exchanging = [list(range(first, first + size)) for first in range(0, num_ranks, size)]
        sharing = [list(range(number, num_ranks, size)) for number in range(size)]
        exchange = _own_group(exchanging, timeout)
        return cls(
            size=size,
            number=rank % size,
            exchange=exchange,
            mesh=DeviceMesh.from_group(_own_group(sharing, timeout), device_type, mesh_dim_names=("expert_shards",)),
        )

    def own(self, experts: torch.Tensor) -> torch.Tensor:
        """Return [O, ...], a view of a tensor [E, ...]: what it has of this rank's experts."""
        return experts.chunk(self.size)[self.number]

    def are_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is this rank's shard of its own experts' parameters."""
        return isinstance(tensor, DTensor) and tensor.device_mesh == self.mesh

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Return [E, ...] of a tensor [O, ...] that each rank has of its experts. All ranks must call this together."""
        experts = own.new_empty(self.size * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(experts, own.contiguous(), group=self.exchange)
        return experts


def _own_group(members: Sequence[list[int]], timeout: timedelta) -> Any:
    group, _ = dist.new_subgroups_by_enumeration(list(members), timeout=timeout)
    return group
