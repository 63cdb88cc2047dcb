"""Rows are read before they are wanted: once each, one at a time, and not beyond the bounds."""

import asyncio
import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from penstock.errors import DataError
from services.trainer.admission.filters import FilterReason
from services.trainer.data.rows.example import Example
from services.trainer.flow.row_reader import MAX_BYTES_AHEAD, MAX_ROWS_AHEAD, RowReader
from tests.support.waiting import HANG_S, promptly, until


def example(*images: bytes) -> Example:
    """A row with these images."""
    return Example(messages=(), images=images, golds=("1",), profile="math", environment="single_turn")


class Rows:
    """Stands in for a data set, and keeps which rows were read, in order."""

    def __init__(self, rows: Mapping[int, Example | FilterReason | DataError] = {}) -> None:
        self.rows = rows
        self.reads: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def playable(self, position: int) -> Example | FilterReason:
        self.reads.append(position)
        assert self.may_end.wait(HANG_S)
        row = self.rows.get(position, example())
        if isinstance(row, DataError):
            raise row
        return row


@contextmanager
def reading(rows: Rows) -> Iterator[RowReader]:
    """What reads them."""
    reader = RowReader(rows)  # type: ignore[arg-type]
    try:
        yield reader
    finally:
        rows.may_end.set()
        reader.close()


def read_on(reader: RowReader, positions: range) -> list[int]:
    """Read ahead up to a bound, as the feeder does; what is returned grows by an item for each row that was read."""
    ended: list[int] = []

    def go_on() -> None:
        ended.append(len(ended))
        reader.read_ahead(positions, on_read=go_on)

    reader.read_ahead(positions, on_read=go_on)
    return ended


async def test_few_rows_are_read_ahead() -> None:
    """However many come up."""
    rows = Rows()
    with reading(rows) as reader:
        ended = read_on(reader, range(7, 7 + 2 * MAX_ROWS_AHEAD))
        await until(lambda: len(ended) == MAX_ROWS_AHEAD)
    assert rows.reads == list(range(7, 7 + MAX_ROWS_AHEAD))


async def test_rows_are_read_ahead_one_at_a_time() -> None:
    """The trainer computes meanwhile, and a row that is wanted finds a thread, though others wait for downloads."""
    rows = Rows()
    rows.may_end.clear()
    ended: list[None] = []
    with reading(rows) as reader:
        for positions in (range(3), range(1, 3), range(3)):
            reader.read_ahead(positions, on_read=lambda: ended.append(None))
        wanted = asyncio.create_task(reader.read(2))
        await until(lambda: len(rows.reads) == 2)
        rows.may_end.set()
        await promptly(wanted)
        await until(lambda: ended)
    assert sorted(rows.reads) == [0, 2]
    assert len(ended) == 1


async def test_images_that_are_read_ahead_are_bounded_in_bytes() -> None:
    """A row that is taken makes room for another."""
    half = bytes(MAX_BYTES_AHEAD // 2)
    rows = Rows({position: example(half) for position in range(9)})
    with reading(rows) as reader:
        ended = read_on(reader, range(9))
        await until(lambda: len(ended) == 2)
        assert await promptly(reader.read(0)) == example(half)
        ended = read_on(reader, range(1, 9))
        await until(lambda: len(ended) == 1)
    assert rows.reads == [0, 1, 2]


async def test_what_is_wrong_with_a_row_is_told_to_whoever_wants_it() -> None:
    """Also that it is passed over. Nobody hears of a row that nobody comes to."""
    rows = Rows({0: FilterReason.OVERLONG_PROMPT, 1: DataError("row 1 is wrong"), 2: DataError("row 2 is wrong")})
    loop, unheard = asyncio.get_running_loop(), list[object]()
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    try:
        with reading(rows) as reader:
            ended = read_on(reader, range(2))
            await until(lambda: len(ended) == 2)
            assert await promptly(reader.read(0)) is FilterReason.OVERLONG_PROMPT
            with pytest.raises(DataError, match="row 1 is wrong"):
                await promptly(reader.read(1))
            reader.read_ahead(range(2, 3), on_read=lambda: ended.append(2))
            await until(lambda: len(ended) == 3)
            reader.read_ahead(range(0), on_read=list)
            gc.collect()
    finally:
        loop.set_exception_handler(handler)
    assert unheard == []


async def test_a_row_that_could_not_be_read_ahead_is_read_again() -> None:
    """Its file server was away for a moment."""
    rows = Rows({0: DataError("row 0 cannot be read")})
    with reading(rows) as reader:
        ended = read_on(reader, range(1))
        await until(lambda: ended)
        rows.rows = {}
        assert await promptly(reader.read(0)) == example()
    assert rows.reads == [0, 0]


async def test_a_row_that_no_longer_comes_up_is_forgotten() -> None:
    """As where its group was in hand when it was admitted; played after all, it is read again."""
    rows = Rows()
    with reading(rows) as reader:
        for number, positions in enumerate((range(1), range(5, 6))):
            ended = read_on(reader, positions)
            await until(lambda ended=ended: ended)
            assert len(rows.reads) == number + 1
        await promptly(reader.read(0))
        await promptly(reader.read(5))
    assert rows.reads == [0, 5, 0]
