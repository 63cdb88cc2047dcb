"""Looks at the lock files of launchers and trainers, which the kernel frees however their process ends.

Invariant: a file system that does not answer, as NFS whose lockd cannot be reached, holds up one thread for each file.
"""

import fcntl
import threading
import time
from pathlib import Path
from typing import Final

_ANSWER_S: Final = 5.0
"""Seconds for which the file system is waited for."""


class LockFile:
    """One lock file. Its method may be called from several threads."""

    def __init__(self, path: Path) -> None:
        """Look at `path`, which need not exist."""
        self._path = path
        self._starting = threading.Lock()
        self._look: _Look | None = None

    def is_locked(self) -> bool:
        """Return whether a process has locked the file; false where that cannot be known."""
        with self._starting:
            if self._look is None or not self._look.is_alive():
                self._look = _Look(self._path)
                self._look.start()
            look = self._look
        look.join(max(0.0, look.wait_until - time.monotonic()))
        return look.is_locked


class _Look(threading.Thread):
    """One look at a lock file. A command does not wait for it at its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="lock_file", daemon=True)
        self._path = path
        self.is_locked = False
        """Whether a process has locked the file, once this thread has ended."""
        self.wait_until = time.monotonic() + _ANSWER_S

    def run(self) -> None:
        try:
            with self._path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_locked = True
        except OSError:
            pass
