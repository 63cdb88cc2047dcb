"""Packed rows of given samples."""

from services.trainer.batching.packing import Block, common_prefix_length
from services.trainer.batching.rows import PackedRow, build_row
from services.trainer.batching.sequences import TrainSequence


def row_of(*sequences: TrainSequence) -> PackedRow:
    """One row, in which nothing is shared."""
    return build_row(sequences, tuple(Block(sequences=(n,), prefix_length=0) for n in range(len(sequences))))


def group_row(*sequences: TrainSequence) -> PackedRow:
    """One row, in which all samples share what they begin with."""
    block = Block(sequences=tuple(range(len(sequences))), prefix_length=common_prefix_length(sequences))
    return build_row(sequences, (block,))
