"""A switch that processes share: whether a run records, while it goes on."""

import mmap
from pathlib import Path


class Switch:
    """A byte of a file in memory."""

    def __init__(self, file: Path) -> None:
        """Share `file`, which is made if it is not there: off."""
        if not file.exists():
            file.write_bytes(b"\0")
        with file.open("r+b") as opened:
            self._byte = mmap.mmap(opened.fileno(), 1)

    @property
    def is_on(self) -> bool:
        """Whether it is on, in this process or another one."""
        return self._byte[0] != 0

    def set(self, is_on: bool) -> None:
        """Switch it for all processes."""
        self._byte[0] = is_on

    def close(self) -> None:
        """Let go of the file."""
        self._byte.close()
