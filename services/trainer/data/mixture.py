"""Chooses the source that is played at a position, when several are mixed.

Invariant: the choice depends only on the weights, the seed and the position. Every source has exactly its share of each
`BLOCK` positions, in the block's own order, so a checkpoint needs only the position.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import numpy as np

from penstock.errors import ConfigError

BLOCK: Final = 1000
"""Positions over which shares are exact, such as 100 steps of 10 prompts. Shares are rounded to a thousandth."""


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
        """Return the source at a position, and the number of earlier positions of the same source.

        Args:
            position: Position, counted from 0 without end.
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
    """Return the positions of each source in a block: rounded down, the rest to the sources that lost most."""
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
