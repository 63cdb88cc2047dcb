"""What is kept of files in memory, up to a bound: blocks of decoded rows, and files that must be held as a whole."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class BlockCache:
    """A cache of the most recently used blocks. May be used from any thread; blocks are read one at a time."""

    def __init__(self, max_bytes: int) -> None:
        """Hold at most `max_bytes`, and always the block that was read last."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of the cached blocks."""
        self.num_held_bytes = 0
        """Bytes of the files that are held as a whole. Blocks have the rest."""
        self._blocks: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Any], *, num_bytes: int) -> Any:
        """Return the block under `key`; the least recently used blocks make room for it.

        Args:
            key: Key of the block.
            read: Reads the block, as an Arrow table.
            num_bytes: Its approximate size in memory.
        """
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key][0]
            self._make_room(num_bytes)
            block = read()
            self._make_room(block.nbytes)
            self._blocks[key] = block, block.nbytes
            self.num_bytes += block.nbytes
            return block

    @property
    def num_free_bytes(self) -> int:
        """Bytes that another file may have that is held as a whole."""
        return self.max_bytes - self.num_held_bytes

    def hold(self, num_bytes: int) -> None:
        """Count a file that is held as a whole; blocks make room for it."""
        with self._lock:
            self.num_held_bytes += num_bytes
            self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        while self._blocks and self.num_bytes + num_bytes > self.num_free_bytes:
            self.num_bytes -= self._blocks.popitem(last=False)[1][1]
