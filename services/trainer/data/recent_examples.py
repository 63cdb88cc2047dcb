"""Keeps the examples that were read last: the episode log wants the row of each group that was played once more."""

import threading
from collections.abc import Callable
from typing import Final

from services.trainer.data.rows.example import Example

_MAX_BYTES: Final = 64 * 2**20
_TEXT_BYTES: Final = 16 * 2**10
"""What an example counts without its images."""

_Key = tuple[str, int]


class RecentExamples:
    """Examples by source and row, up to a size in bytes. May be used from several threads."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: dict[_Key, Example] = {}
        """Those that were asked for last are at the end."""
        self._lock = threading.Lock()

    def read(self, source: str, row: int, read: Callable[[int], Example]) -> Example:
        """Return the example, as kept or by `read(row)`, whose errors are not kept."""
        with self._lock:
            if (kept := self._kept.pop((source, row), None)) is not None:
                self._kept[source, row] = kept
                return kept
        example = read(row)
        with self._lock:
            if (source, row) not in self._kept:
                self._num_bytes += _size_of(example)
            self._kept[source, row] = example
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size_of(self._kept.pop(next(iter(self._kept))))
        return example


def _size_of(example: Example) -> int:
    return _TEXT_BYTES + sum(map(len, example.images))
