"""Batches of demonstrations: the data's rows, in order of their positions, read ahead in a thread.

Invariant: a batch depends only on the data, the settings, the seed and the position at which it begins, so a checkpoint
keeps one integer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import DataError, InvalidRequestError
from services.trainer.admission.filters import FilterReason
from services.trainer.batching.sequences import TrainSequence
from services.trainer.data.dataset import Dataset
from services.trainer.sft.sequences import DemonstrationReader, RenderedDemonstration


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SftBatch:
    """The demonstrations of one optimizer step."""

    rendered: Sequence[RenderedDemonstration]
    sequences: Sequence[TrainSequence]
    """The same, expanded."""
    stop: int
    """Position at which the next batch begins."""
    num_passed_over: int
    """Rows before `stop` that are too long, or wrong where these are dropped."""


class BatchReader:
    """Reads batches. Slow for large images, so call it from a thread, one at a time."""

    def __init__(
        self,
        dataset: Dataset,
        reader: DemonstrationReader,
        *,
        batch_size: int,
        batch_unit: Literal["samples", "tokens"] = "samples",
    ) -> None:
        """Read from `dataset`, whose rows are demonstrations, batches of a size in samples or tokens."""
        self._dataset = dataset
        self._reader = reader
        self._size = batch_size
        self._counts_tokens = batch_unit == "tokens"

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self._dataset.num_rows

    def read(self, start: int) -> SftBatch:
        """Return the batch that begins at a position.

        Raises:
            DataError: a row is wrong and wrong rows are refused, or an epoch has no row to learn from.
        """
        rendered: list[RenderedDemonstration] = []
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
                        f"{num_in_a_row} rows one after the other are too long or wrong; `penstock data --sft` says "
                        "why, of a data.path"
                    )
            else:
                try:
                    tokens = self._reader.render(found)
                    sequence = self._reader.expand(tokens)
                except InvalidRequestError as error:
                    name, number = self._dataset.row_at(position)
                    raise self._dataset.sources[name].wrong(number, error) from None
                num_in_a_row = 0
                added = len(sequence) if self._counts_tokens else 1
                if sequences and size + added > self._size:
                    break
                rendered.append(tokens)
                sequences.append(sequence)
                size += added
            position += 1
        return SftBatch(rendered=rendered, sequences=sequences, stop=position, num_passed_over=num_passed_over)


class BatchesAhead:
    """Consecutive batches, each read while the one before it is learned."""

    def __init__(self, reader: BatchReader, position: int) -> None:
        """Begin with the batch at a position; nothing is read yet."""
        self.position = position
        """At which the first batch begins that was not learned: what a checkpoint keeps."""
        self._reader = reader
        self._reading: asyncio.Task[SftBatch] | None = None

    @property
    def epoch(self) -> float:
        """Epochs that were learned."""
        return self.position / self._reader.num_rows

    def begin(self) -> None:
        """Begin to read, if that has not begun."""
        if self._reading is None:
            self._reading = self._read(self.position)

    async def take(self, *, is_last: bool = False) -> SftBatch:
        """Return the batch at `position`, and begin to read the next unless it is the last; `learned` must follow.

        Raises:
            DataError: see `BatchReader.read`.
        """
        self.begin()
        assert self._reading is not None, "it has begun"
        batch = await self._reading
        self._reading = None if is_last else self._read(batch.stop)
        return batch

    def learned(self, batch: SftBatch) -> None:
        """Go on behind the batch that was taken."""
        self.position = batch.stop

    async def close(self) -> None:
        """Wait for what is being read, and forget it: a caller that goes on at `position` gets its errors again."""
        if self._reading is not None:
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()

    def _read(self, position: int) -> "asyncio.Task[SftBatch]":
        return asyncio.create_task(asyncio.to_thread(self._reader.read, position))
