"""Looks at the lock files of launchers and trainers, which the kernel frees however their process ends.

Invariant: a file system that does not answer, such as NFS whose lockd cannot be reached, holds up one thread for each
file.
"""

import fcntl
import threading
import time
from pathlib import Path
from typing import Final

_ANSWER_S: Final = 5.0
"""Seconds for which the file system is waited for."""


class LockFile:
    """One lock file. Its methods may be called from several threads."""

    def __init__(self, path: Path) -> None:
        """Look at `path`, which need not exist."""
        self._path = path
        self._starting = threading.Lock()
        self._look: _Look | None = None

    def is_locked(self) -> bool:
        """Return whether a process has locked the file; false where that cannot be known."""
        return self.begin_look().found()

    def begin_look(self) -> "_Look":
        """Begin to look, so that several files can be waited for at once."""
        with self._starting:
            if self._look is None or not self._look.is_alive():
                self._look = _Look(self._path)
                self._look.start()
            return self._look


class _Look(threading.Thread):
    """One look at a lock file. A command does not wait for it at its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="lock_file", daemon=True)
        self._path = path
        self._is_locked = False
        self._wait_until = time.monotonic() + _ANSWER_S

    def found(self) -> bool:
        """Wait for the answer; return whether a process has locked the file."""
        self.join(max(0.0, self._wait_until - time.monotonic()))
        return self._is_locked

    def run(self) -> None:
        try:
            with self._path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._is_locked = True
        except OSError:
            pass
