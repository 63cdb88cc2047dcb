"""Prefix-aware: calls go where the longest part of their prompt was lately, unless too much is there already.

The samples of a group share a prompt, and a conversation's turns share a growing one; a replica that had the beginning
has it in its prefix cache.
"""

import array
import collections
from collections.abc import Iterable, Mapping, Sequence

from services.router.balancing.balancer import find_fit
from services.router.balancing.replica_status import Query, ReplicaStatus

BLOCK_TOKENS = 64
"""Prompts are compared in blocks of so many tokens."""

_SLACK = 0.25
"""The share of its places by which a replica's load may be above the least without any ratio: few calls are no load."""
_IMAGE_TAIL_BYTES = 64


class PrefixBalancer:
    """The replica that had the longest prefix if it is fit and not overloaded; else the least loaded."""

    reads_blocks = True

    def __init__(self, *, max_blocks: int, max_load_ratio: float) -> None:
        """Remember `max_blocks`; leave a replica with more than `max_load_ratio` times the least load."""
        self._max_blocks = max_blocks
        self._max_load_ratio = max_load_ratio
        self._replica_of: collections.OrderedDict[int, str] = collections.OrderedDict()

    def choose(self, query: Query, candidates: Mapping[str, ReplicaStatus], now: float) -> ReplicaStatus | None:
        """The replica that gets the call; None exactly if none is fit."""
        fit = find_fit(query, candidates, now)
        least = min(fit, key=lambda each: (each.load, each.replica_id), default=None)
        if least is None:
            return None
        for block in reversed(query.blocks):
            owner = candidates.get(self._replica_of.get(block, ""))
            if owner is not None and owner.is_fit(query, now):
                overloaded = owner.load > self._max_load_ratio * least.load + _SLACK
                return least if overloaded else owner
        return least

    def record(self, query: Query, replica_id: str) -> None:
        """The replica has the prompt's blocks from now on."""
        for block in query.blocks:
            self._replica_of[block] = replica_id
            self._replica_of.move_to_end(block)
        while len(self._replica_of) > self._max_blocks:
            self._replica_of.popitem(last=False)


def hash_blocks(input_ids: Sequence[int], images: Iterable[bytes] = ()) -> tuple[int, ...]:
    """One number for each whole block of a prompt; it stands for the block and all before it.

    Where images are in the prompt is not known here; the first one's length and last bytes count as the beginning,
    which tells prompts with the same words and other pictures apart. Numbers mean nothing in other processes.
    """
    first = next(iter(images), b"")
    number = hash((len(first), first[-_IMAGE_TAIL_BYTES:]))
    ids = array.array("i", input_ids)
    numbers = []
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        number = hash((number, ids[start : start + BLOCK_TOKENS].tobytes()))
        numbers.append(number)
    return tuple(numbers)
