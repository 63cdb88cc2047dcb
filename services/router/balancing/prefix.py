"""Prefix-aware balancing: prefers the replica that recently had the longest beginning of the prompt.

The samples of a group share a prompt, and a conversation's turns share a growing one; a replica that had the beginning
holds it in its prefix cache.
"""

import array
import collections
from collections.abc import Iterable, Sequence

from services.router.balancing.pool_view import PoolView, Query
from services.router.balancing.replica_status import ReplicaStatus

BLOCK_TOKENS = 64
"""Prompts are compared in blocks of this many tokens."""

_SLACK = 0.25
"""Calls per slot by which a load may exceed the least load at any ratio, because ratios of few calls mean nothing."""
_IMAGE_TAIL_BYTES = 64


class PrefixBalancer:
    """Chooses the fit replica with the longest prefix unless it is overloaded; else the least loaded."""

    reads_blocks = True

    def __init__(self, *, max_blocks: int, max_load_ratio: float) -> None:
        """Remember `max_blocks`; avoid a replica with more than `max_load_ratio` times the least load."""
        self._max_blocks = max_blocks
        self._max_load_ratio = max_load_ratio
        self._replica_of: collections.OrderedDict[int, str] = collections.OrderedDict()

    def choose(self, query: Query, pool: PoolView, now: float) -> ReplicaStatus | None:
        """Return the replica that gets the call; None exactly if none is fit."""
        fit = pool.find_fit(query, now)
        loads = pool.loads(fit)
        least = min(fit, key=lambda each: (loads[each.replica_id], each.replica_id), default=None)
        if least is None:
            return None
        for block in reversed(query.blocks):
            owner = pool.replicas.get(self._replica_of.get(block, ""))
            if owner is not None and pool.is_fit(owner, query, now):
                owner_load = pool.loads((owner,))[owner.replica_id]  # it may take a push, and the others none
                is_overloaded = owner_load > self._max_load_ratio * loads[least.replica_id] + _SLACK
                return least if is_overloaded else owner
        return least

    def find_home(self, query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
        """Return no home: no call waits while a replica can take it."""
        return "", False

    def record(self, query: Query, replica_id: str) -> None:
        """Remember that the replica holds the prompt's blocks."""
        for block in query.blocks:
            self._replica_of[block] = replica_id
            self._replica_of.move_to_end(block)
        while len(self._replica_of) > self._max_blocks:
            self._replica_of.popitem(last=False)


def hash_blocks(input_ids: Sequence[int], images: Iterable[bytes] = ()) -> tuple[int, ...]:
    """Return one number for each whole block of a prompt; it identifies the block and everything before it.

    The position of images in the prompt is unknown here. The first image's size and last bytes count as the beginning,
    which distinguishes prompts with the same words and different pictures. Numbers mean nothing in other processes.
    """
    first = next(iter(images), b"")
    number = hash((len(first), first[-_IMAGE_TAIL_BYTES:]))
    ids = array.array("i", input_ids)
    numbers = []
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        number = hash((number, ids[start : start + BLOCK_TOKENS].tobytes()))
        numbers.append(number)
    return tuple(numbers)
