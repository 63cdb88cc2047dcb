"""Counts what a model multiplies in packed rows: tokens, pairs of them, and images. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.trainer.batching.images import ImagePatches
from services.trainer.batching.packing import Row, num_row_tokens
from services.trainer.batching.row_costs import num_pairs
from services.trainer.batching.sequences import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCounts:
    """Counts of some rows. Padding is in none of them."""

    tokens: int
    """Tokens that the model reads."""
    pairs: int
    """Pairs of a token and one that it attends to, itself included."""
    own_tokens: int
    """Tokens that are predicted."""
    grids: Mapping[tuple[int, int, int], int]
    """How many images of each size in patches the vision tower reads: in each row, every different image once."""

    @classmethod
    def of(cls, rows: Sequence[Row], sequences: Sequence[TrainSequence]) -> "ProductCounts":
        """Count.

        Args:
            rows: Rows of a plan.
            sequences: All sequences of the batch, by number.
        """
        lengths = [sequence.num_inputs for sequence in sequences]
        return cls(
            tokens=sum(num_row_tokens(row, lengths) for row in rows),
            pairs=sum(num_pairs(row, lengths) for row in rows),
            own_tokens=sum(
                sequences[number].num_own_tokens for row in rows for block in row for number in block.sequences
            ),
            grids=Counter(image.grid_thw for row in rows for image in different_images(row, sequences)),
        )


def different_images(row: Row, sequences: Sequence[TrainSequence]) -> Iterator[ImagePatches]:
    """Yield each different image of a row once."""
    numbers = (number for block in row for number in block.sequences)
    yield from {id(image): image for number in numbers for image in sequences[number].images}.values()
