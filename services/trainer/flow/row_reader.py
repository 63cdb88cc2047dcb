"""Reads the rows of a data set in threads, and those that come up next before they are wanted.

Invariants: of the rows that are read ahead, one is being read at a time, and those that are kept are bounded. A row
that cannot be read is an error only for whoever wants it, and only if it still cannot be read then.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from services.trainer.admission.filters import FilterReason
from services.trainer.admission.pools import Row
from services.trainer.data.dataset import Dataset
from services.trainer.data.rows.example import Example

ReadT = TypeVar("ReadT")

MAX_ROWS_AHEAD: Final = 64
"""Most rows that are read ahead: while the bus takes their prompts, the threads read the others."""
MAX_BYTES_AHEAD: Final = 64 * 2**20
"""Bytes of images in the rows that are read ahead, from which on no other row is begun."""


class RowReader:
    """The rows at positions of a data set. Close it after use.

    They are read in threads of its own, because they may wait for a download, which no push, step or checkpoint must
    wait for. The threads log as the calling task does.
    """

    def __init__(self, dataset: Dataset) -> None:
        """Read rows of `dataset`."""
        self._dataset = dataset
        self._threads = ThreadPoolExecutor(thread_name_prefix="rows")
        self._ahead: dict[int, asyncio.Future[Example | FilterReason]] = {}
        """Rows that are read ahead, or being read, by position."""
        self._is_reading_ahead = False

    def close(self) -> None:
        """End the threads, and drop the reads that wait for one. Blocks until the others have ended."""
        self._threads.shutdown(cancel_futures=True)

    async def rows_at(self, positions: range) -> list[Row]:
        """Return which rows are at positions, without reading them."""
        return await self._start(lambda: [self._dataset.row_at(position) for position in positions])

    async def read(self, position: int) -> Example | FilterReason:
        """Return the example at a position, or why it is passed over.

        Raises:
            DataError: the row is invalid, and `wrong_rows` is refuse.
        """
        read = self._ahead.pop(position, None)
        if read is None or (read.done() and read.exception() is not None):  # what failed then may succeed now
            read = self._start(partial(self._dataset.playable, position))
        return await read

    def read_ahead(self, positions: range, *, on_read: Callable[[], object]) -> None:
        """Begin to read the first of `positions` that is not read yet, and forget rows at any others.

        Nothing is begun while another row is being read ahead, or if those that are read have reached a bound.

        Args:
            positions: Positions that come up next.
            on_read: Called in the event loop when the row is read.
        """
        positions = positions[:MAX_ROWS_AHEAD]
        self._ahead = {position: read for position, read in self._ahead.items() if position in positions}
        if self._is_reading_ahead or sum(map(_num_bytes, self._ahead.values())) >= MAX_BYTES_AHEAD:
            return
        unread = next((position for position in positions if position not in self._ahead), None)
        if unread is None:
            return

        def end(read: asyncio.Future[Example | FilterReason]) -> None:
            self._is_reading_ahead = False
            if not read.cancelled():
                read.exception()  # nobody may want it
                on_read()

        self._is_reading_ahead = True
        self._ahead[unread] = self._start(partial(self._dataset.playable, unread))
        self._ahead[unread].add_done_callback(end)

    def _start(self, read: Callable[[], ReadT]) -> asyncio.Future[ReadT]:
        context = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(self._threads, lambda: context.run(read))


def _num_bytes(read: asyncio.Future[Example | FilterReason]) -> int:
    """Return the bytes of images in a row that was read."""
    if read.cancelled() or read.exception() is not None:
        return 0
    row = read.result()
    return sum(map(len, row.images)) if isinstance(row, Example) else 0
