"""Keeps the examples that were read last: the episode log wants the row of each group that was played once more."""

import threading
from collections.abc import Callable
from typing import Final

import msgspec

from services.trainer.data.rows.example import Example

_MAX_BYTES: Final = 64 * 2**20
_OVERHEAD_BYTES: Final = 16 * 2**10
"""What an example counts beside its images and texts."""
_MAX_CHARACTER_BYTES: Final = 4
"""Of a str, for each of its characters."""

_Key = tuple[str, int]


class RecentExamples:
    """Examples by source and row, up to a size in bytes. May be used from several threads."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: dict[_Key, tuple[Example, int]] = {}
        """Examples and their sizes; those that were asked for last are at the end."""
        self._lock = threading.Lock()

    def read(self, source: str, row: int, read: Callable[[int], Example]) -> Example:
        """Return the example, as kept or by `read(row)`, whose errors are not kept."""
        with self._lock:
            if (kept := self._kept.pop((source, row), None)) is not None:
                self._kept[source, row] = kept
                return kept[0]
        example = read(row)
        size = _size_of(example)
        with self._lock:
            _, replaced = self._kept.pop((source, row), (None, 0))  # another thread may have read it, too
            self._kept[source, row] = example, size
            self._num_bytes += size - replaced
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._kept.pop(next(iter(self._kept)))[1]
        return example


def _size_of(example: Example) -> int:
    texts = msgspec.msgpack.encode((example.messages, example.golds, example.tools, example.extra))
    return _OVERHEAD_BYTES + sum(map(len, example.images)) + _MAX_CHARACTER_BYTES * len(texts)
