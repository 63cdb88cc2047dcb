"""Follows a file of JSON objects, one a line, while another process appends to it or replaces it."""

import json
import os
from pathlib import Path
from typing import Any


class JsonLinesFollower:
    """The objects of a file; each read continues where the last one ended. A line counts when it is whole."""

    def __init__(self, path: Path) -> None:
        """Follow the file at `path`, which need not exist yet."""
        self.rows: list[dict[str, Any]] = []
        """All objects so far."""
        self.generation = 0
        """Grows whenever the file was replaced or cut, and is read from its beginning again."""
        self._path = path
        self._offset = 0
        self._inode = -1

    def poll(self) -> list[dict[str, Any]]:
        """Read and return what is new, or everything if the file was replaced; skip lines that are no JSON object."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())  # of the open file, whatever replaces it meanwhile
            if status.st_ino != self._inode or status.st_size < self._offset:
                self.generation += self._inode != -1
                self._inode, self._offset, self.rows = status.st_ino, 0, []
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        new = [row for line in whole.split(b"\n") if (row := _parsed(line)) is not None]
        self.rows += new
        return new


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
