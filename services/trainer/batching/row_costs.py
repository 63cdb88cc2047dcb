"""What a packed row costs beside others, so that ranks which wait for each other get rows that take equally long. Pure.

A unit is what one token costs outside of attention. In attention a token is multiplied with every token before it, so
one long sample costs more than several short ones of as many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.batching.packing import Row, num_row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Costs of what is in a row, in those of a token."""

    per_pair: float = 0.0
    """Of a token and one that it attends to."""
    per_patch: float = 1.0
    """Of a patch of an image in the vision tower."""

    def of(self, row: Row, lengths: Sequence[int], num_patches: int) -> float:
        """Return the cost of a row.

        Args:
            row: The row.
            lengths: Input tokens of every sequence.
            num_patches: Patches of its different images.
        """
        return num_row_tokens(row, lengths) + self.per_pair * num_pairs(row, lengths) + self.per_patch * num_patches


def num_pairs(row: Row, lengths: Sequence[int]) -> int:
    """Return how many pairs of a token and one that it attends to, itself included, a row has.

    A sequence attends to its own tokens and to its block's prefix, which attends to itself once.
    """
    pairs = 0
    for block in row:
        prefix = block.prefix_length
        pairs += prefix * (prefix + 1) // 2
        for number in block.sequences:
            own = lengths[number] - prefix
            pairs += own * prefix + own * (own + 1) // 2
    return pairs
