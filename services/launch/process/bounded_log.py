"""A bounded log file to which a process of the run appends."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 64 * 2**20
"""More than a busy process writes in a week at level info; after a failure, people read the newest lines."""
_TAIL_BYTES = 64 * 2**10


class BoundedLog:
    """The file at `path` and its predecessor `path.1`: together at most about twice `max_bytes`.

    The writers have the file open for appending, and some are not ours (SGLang, nats-server), so it cannot be renamed
    under them. Instead its content is copied and the file truncated. Lines written in between are lost.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._start = 0

    def mark_start(self) -> None:
        """Mark the end of the log as the beginning of a new start of the process."""
        self._start = self._size()

    def bound(self) -> None:
        """Move the content to `path.1` if it exceeds the bound; drop it if the disk is full. Blocking."""
        if self._size() > self._max_bytes:
            predecessor = self.path.with_name(f"{self.path.name}.1")
            try:
                shutil.copyfile(self.path, predecessor)
            except OSError:
                predecessor.unlink(missing_ok=True)  # it is incomplete
            os.truncate(self.path, 0)
            self._start = 0

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines since the newest start, as far as the file still holds them."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(max(self._start, self._size() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
        return []

    def _size(self) -> int:
        with suppress(FileNotFoundError):
            return self.path.stat().st_size
        return 0
