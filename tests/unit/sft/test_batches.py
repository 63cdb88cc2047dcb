"""Batches of demonstrations: which rows they pass over, when they give up, and how they are read ahead."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import DataError
from services.trainer.admission.filters import FilterReason
from services.trainer.sft.batches import BatchesAhead, BatchReader, SftBatch
from tests.support.waiting import HANG_S, promptly, settled


def reader_of(fits: list[bool], *, batch_size: int) -> BatchReader:
    """Read a data set of which these rows fit, over and over; a row's sequence has one token."""
    dataset: Any = SimpleNamespace(
        num_rows=len(fits),
        playable=lambda position: position if fits[position % len(fits)] else FilterReason.OVERLONG_PROMPT,
    )
    reader: Any = SimpleNamespace(render=lambda position: position, expand=lambda position: [position])
    return BatchReader(dataset, reader, batch_size=batch_size)


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


async def test_batches_follow_each_other_and_a_position_is_all_that_a_run_goes_on_from() -> None:
    """The next one is read while the one before is learned; one that was taken and not learned comes again."""
    fits = [True, False, True, True, True, False]
    whole = [reader_of(fits, batch_size=3).read(position) for position in (0, 4, 9)]
    ahead = BatchesAhead(reader_of(fits, batch_size=3), 0)
    for expected in whole[:2]:
        batch = await ahead.take()
        assert (list(batch.sequences), batch.stop) == (list(expected.sequences), expected.stop)
        ahead.learned(batch)
    assert (ahead.position, ahead.epoch) == (9, 1.5)
    await ahead.take()
    await ahead.close()
    resumed = BatchesAhead(reader_of(fits, batch_size=3), ahead.position)
    assert list((await resumed.take(is_last=True)).sequences) == list(whole[2].sequences)
    await resumed.close()


async def test_a_row_that_is_wrong_is_said_when_its_batch_is_taken() -> None:
    """Not while the batch before it is learned, and never twice."""
    reader = reader_of([True], batch_size=1)

    def read(position: int) -> SftBatch:
        if position == 1:
            raise DataError("row 1")
        return SftBatch(rendered=[], sequences=[], stop=position + 1, num_passed_over=0)

    reader.read = read  # type: ignore[method-assign]
    ahead = BatchesAhead(reader, 0)
    ahead.begin()
    ahead.learned(await ahead.take())
    with pytest.raises(DataError, match="row 1"):
        await ahead.take()
    await ahead.close()


async def test_reading_never_holds_up_the_event_loop() -> None:
    """It is in a thread: the loop goes on while a row is read."""
    reader, may_go_on = reader_of([True], batch_size=1), threading.Event()

    def read(position: int) -> SftBatch:
        assert may_go_on.wait(HANG_S)
        return SftBatch(rendered=[], sequences=[], stop=position + 1, num_passed_over=0)

    reader.read = read  # type: ignore[method-assign]
    ahead = BatchesAhead(reader, 0)
    taking = asyncio.create_task(ahead.take(is_last=True))
    await settled()
    assert not taking.done()
    may_go_on.set()
    assert (await promptly(taking)).stop == 1
