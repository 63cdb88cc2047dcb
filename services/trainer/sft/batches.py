"""The batches of supervised training: the data's rows, in order of their positions.

Invariant: a batch depends only on the data, the settings, the seed and the position at which it begins, so a checkpoint
keeps one integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import DataError, InvalidRequestError
from services.trainer.admission.filters import FilterReason
from services.trainer.batching.sequences import TrainSequence
from services.trainer.data.dataset import Dataset
from services.trainer.sft.config import SftConfig
from services.trainer.sft.sequences import DemonstrationReader


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SftBatch:
    """What one optimizer step learns."""

    sequences: Sequence[TrainSequence]
    stop: int
    """Position at which the next batch begins."""
    num_passed_over: int
    """Rows before `stop` that are too long, or wrong where these are dropped."""


class BatchReader:
    """Reads batches. Slow for large images, so call it from a thread, one at a time."""

    def __init__(self, dataset: Dataset, reader: DemonstrationReader, config: SftConfig) -> None:
        """Read from `dataset`, whose rows are demonstrations."""
        self._dataset = dataset
        self._reader = reader
        self._size = config.batch_size
        self._counts_tokens = config.batch_unit == "tokens"

    def read(self, start: int) -> SftBatch:
        """Return the batch that begins at a position.

        Raises:
            DataError: a row is wrong and wrong rows are refused, or an epoch has no row to learn from.
        """
        sequences: list[TrainSequence] = []
        size = num_passed_over = num_in_a_row = 0
        position = start
        while size < self._size:
            found = self._dataset.playable(position)
            if isinstance(found, FilterReason):
                num_passed_over += 1
                num_in_a_row += 1
                if num_in_a_row > self._dataset.num_rows:
                    raise DataError(
                        f"{num_in_a_row} rows one after the other are too long or wrong; `penstock data --sft` says why"
                    )
            else:
                try:
                    sequence = self._reader.read(found)
                except InvalidRequestError as error:
                    name, number = self._dataset.row_at(position)
                    raise self._dataset.sources[name].wrong(number, error) from None
                num_in_a_row = 0
                added = len(sequence) if self._counts_tokens else 1
                if sequences and size + added > self._size:
                    break
                sequences.append(sequence)
                size += added
            position += 1
        return SftBatch(sequences=sequences, stop=position, num_passed_over=num_passed_over)
