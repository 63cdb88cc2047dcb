"""Standard output that may go away while a run goes on: a closed terminal, the end of a pipe, a full disk."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

import structlog

log = structlog.get_logger()

_FOR_EVER = (errno.EPIPE, errno.EIO)
"""Nobody reads it any longer. Other errors, as of a full disk, may pass."""


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within the context, what cannot be written to standard output is left out, with one event in the log.

    Otherwise the end of `tee` or of a terminal would end the run with it, before the trainer has saved.
    """
    before = sys.stdout
    sys.stdout = cast(TextIO, _LastingOutput(before))
    try:
        yield
    finally:
        sys.stdout = before


class _LastingOutput:
    """A stream whose errors end nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write it, if it can be written."""
        self._try(lambda: self._stream.write(text))  # into a buffer, which is no proof that it can be written
        return len(text)

    def flush(self) -> None:
        """Flush it, if it can be written."""
        if self._try(self._stream.flush):
            self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> bool:
        """Do it, and return whether it could be done."""
        try:
            act()
        except OSError as error:
            if self._is_lost:
                return False
            self._is_lost = True  # first: the log may go the same way
            if error.errno in _FOR_EVER:
                self._silence()
            log.warning("output.lost", error=str(error), effect="the run goes on; `penstock status` shows it")
            return False
        return True

    def _silence(self) -> None:
        """Write to nowhere from now on, also what is in buffers, and what Python writes at the process's end."""
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # a test's stream has no descriptor
            os.dup2(nowhere.fileno(), self._stream.fileno())
