"""Batches of supervised training: which rows they pass over, and when they give up."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import DataError
from services.trainer.admission.filters import FilterReason
from services.trainer.sft.batches import BatchReader


def reader_of(fits: list[bool], *, batch_size: int) -> BatchReader:
    """Read a data set of which these rows fit, over and over; a row's sequence has one token."""
    dataset: Any = SimpleNamespace(
        num_rows=len(fits),
        playable=lambda position: position if fits[position % len(fits)] else FilterReason.OVERLONG_PROMPT,
    )
    reader: Any = SimpleNamespace(read=lambda position: [position])
    config: Any = SimpleNamespace(batch_size=batch_size, batch_unit="samples")
    return BatchReader(dataset, reader, config)


def test_a_batch_of_more_rows_than_fit_goes_on_to_the_next_epochs() -> None:
    """Of ten rows three fit: a batch of eight passes over more rows than there are, but never over all in a row."""
    fits = [False, True, False, False, True, False, False, False, True, False]
    batch = reader_of(fits, batch_size=8).read(0)
    assert list(batch.sequences) == [[1], [4], [8], [11], [14], [18], [21], [24]]
    assert (batch.stop, batch.num_passed_over) == (25, 17)


def test_data_without_a_row_that_fits_are_an_error() -> None:
    """After one row more than an epoch has."""
    with pytest.raises(DataError, match=r"^4 rows one after the other are too long or wrong"):
        reader_of([False] * 3, batch_size=2).read(0)
