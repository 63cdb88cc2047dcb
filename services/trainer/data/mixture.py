"""Which source is played at a position, when several are mixed.

Invariant: the choice depends on the weights, the seed and the position alone. Of each `BLOCK` positions every source
has exactly its share, in an order of the block's own, so a checkpoint needs no more than the position.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import numpy as np

from penstock.errors import ConfigError

BLOCK: Final = 1000
"""Shares are rounded to a thousandth; a hundred steps of ten prompts have them exactly."""


class Mixture:
    """Sources by position."""

    def __init__(self, weights: Mapping[str, float], *, seed: int) -> None:
        """Mix sources by weight.

        Args:
            weights: The sources' weights, by name.
            seed: Seed of the order.

        Raises:
            ConfigError: a source's share is too small.
        """
        self.shares = _shares(weights)
        self._ends = list(accumulate(self.shares))
        self._seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """Return the source at a position, and how many earlier positions are the same source's.

        Args:
            position: From 0, without end.
        """
        if len(self.shares) == 1:
            return 0, position
        block, index = divmod(position, BLOCK)
        order = _order(self._seed, block)
        source = bisect_right(self._ends, int(order[index]))
        first = self._ends[source] - self.shares[source]
        earlier = order[:index]
        num_earlier = int(np.count_nonzero((earlier >= first) & (earlier < self._ends[source])))
        return source, block * self.shares[source] + num_earlier


@lru_cache(maxsize=4)
def _order(seed: int, block: int) -> np.ndarray:
    return np.random.default_rng((seed, block, 1)).permutation(BLOCK)


def _shares(weights: Mapping[str, float]) -> Sequence[int]:
    """Positions of each source in a block: rounded down, the rest to those that lost most."""
    total = sum(weights.values())
    exact = [BLOCK * weight / total for weight in weights.values()]
    shares = [int(share) for share in exact]
    by_loss = sorted(range(len(exact)), key=lambda number: (shares[number] - exact[number], number))
    for number in by_loss[: BLOCK - sum(shares)]:
        shares[number] += 1
    for name, share in zip(weights, shares, strict=True):
        if share == 0:
            raise ConfigError(
                f"data.sources.{name}.weight = {weights[name]:g} is less than a thousandth of all weights, {total:g}; "
                "raise it or remove the source"
            )
    return shares
