"""Files of JSON objects, one a line: reads them also while another process appends to them or replaces them.

Invariant: wherever a writer was killed, a reader finds every whole line, and those that the next writer appends.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_TAIL_BYTES: Final = 256


def every_field(name: str) -> bool:
    """Return True: all fields are kept."""
    return True


class JsonLinesFollower:
    """The objects of a file; each read continues where the last one ended. A line counts when it is whole."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool] = every_field) -> None:
        """Follow a file.

        Args:
            path: Its path; it need not exist yet.
            keep: Tells of a field's name whether objects keep the field. A long run has gigabytes of metrics.
        """
        self.rows: list[dict[str, Any]] = []
        """All objects so far."""
        self.generation = 0
        """Grows whenever the file was replaced or cut, and is read from its beginning again."""
        self._path = path
        self._keep = keep
        self._offset = 0
        self._inode = -1
        self._tail = b""
        """The last bytes that were read. A file that replaced another one may have its inode, but not these."""

    def poll(self) -> list[dict[str, Any]]:
        """Read and return what is new, or everything if the file was replaced; skip lines that are no JSON object."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())  # of the open file, whatever replaces it meanwhile
            file.seek(self._offset - len(self._tail))
            if status.st_ino != self._inode or file.read(len(self._tail)) != self._tail:
                self.generation += self._inode != -1
                self._inode, self._offset, self._tail, self.rows = status.st_ino, 0, b"", []
                file.seek(0)
            new, size, tail = list[dict[str, Any]](), 0, self._tail
            for line in file:
                if not line.endswith(b"\n"):
                    break
                size, tail = size + len(line), (tail + line)[-_TAIL_BYTES:]
                if row := read_object(line):
                    new.append(kept_fields(row, self._keep))
        self._offset, self._tail = self._offset + size, tail
        self.rows += new
        return new


def kept_fields(row: dict[str, Any], keep: Callable[[str], bool]) -> dict[str, Any]:
    """Return the fields to keep, with keys that all rows share; otherwise they take more memory than the values."""
    return {sys.intern(name): value for name, value in row.items() if keep(name)}


def append_lines(path: str | Path, lines: bytes | bytearray, *, is_synced: bool = False) -> int:
    """Append whole lines, all or none of them. What a killed writer cut off becomes a line of its own. Blocks.

    Args:
        path: The file; it is made if it does not exist.
        lines: The lines with their ends.
        is_synced: Whether to return only once the disk has them.

    Returns:
        The offset of the first line.

    Raises:
        OSError: they cannot be written, for example because the disk is full.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)  # a file object costs three times as much
    try:
        size = offset = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            lines, offset = b"\n" + lines, size + 1
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
            if is_synced:
                os.fsync(file)
        except OSError:
            with suppress(OSError):  # nobody counts the lines that have been written
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
    return offset


def read_object(line: str | bytes) -> dict[str, Any]:
    """Return the object on a line; empty if there is none, as where a crash cut the line off."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
