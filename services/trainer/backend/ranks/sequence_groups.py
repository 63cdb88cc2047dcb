"""Sequence parallelism: which ranks share the rows that they compute.

With 4 ranks and `sequence_parallel` = 2, ranks 0 and 1 compute one row together while 2 and 3 compute another.
Neighbours share a row, so exchanges stay inside a machine where they can. Weights are sharded over all ranks as without
it: gradients are plain sums over ranks, whichever tokens of whichever rows each of them computes.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that this one shares rows with."""

    size: int = 1
    """Ranks that share a row."""
    number: int = 0
    """This rank's place among them: it computes the tokens that stand there."""
    exchange: Any = None
    """torch's process group of these ranks, in the order of their tokens; None for a rank that shares none."""

    @classmethod
    def form(cls, size: int, *, rank: int, num_ranks: int, timeout: timedelta) -> Self:
        """Form the groups of all ranks, which must call this together.

        Args:
            size: `trainer.sequence_parallel`; it divides `num_ranks`.
            rank: This rank.
            num_ranks: All ranks.
            timeout: The longest that a rank waits for the others of a group.
        """
        members = [list(range(first, first + size)) for first in range(0, num_ranks, size)]
        exchange, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
        return cls(size=size, number=rank % size, exchange=exchange)
