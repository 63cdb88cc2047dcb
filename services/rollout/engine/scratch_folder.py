"""A folder for the temporary files of this process and its children, removed with it, also after kill -9.

SGLang makes a file for each of its sockets and removes none of them. The path of a socket has at most 107 characters,
so the folder is in /tmp where TMPDIR leaves too few. Invariant: a folder whose process has ended is removed by the next
process that makes one in the same place; a folder in use never is, nor one that was not made here.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "penstock-engine-"
_MAX_PARENT_CHARS = 107 - len(f"/{_PREFIX}xxxxxxxx") - len("/tmpxxxxxxxxxxx")
"""Of the folder above: what Linux allows a socket, less the names that `tempfile` gives the folder and the socket."""
_SHORT_PARENT = Path("/tmp")
_LOCK = ".penstock-engine.lock"
"""The file in a folder that its process has locked. A folder without it is somebody else's, whatever its name."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Use a folder of this process's own as TMPDIR during the context, and remove what dead processes left.

    It sets the environment variable, for children, and `tempfile.tempdir`, for this process.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _MAX_PARENT_CHARS:
        parent = _SHORT_PARENT
    _remove_abandoned(parent)
    folder, lock = _make(parent)
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]
        tempfile.tempdir = before[1]
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock until it is closed or the process ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _lock(folder, os.O_RDWR | os.O_CREAT)
        if lock is not None:
            return folder, lock


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = _lock(folder, os.O_RDWR)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, flags: int) -> int | None:
    """Lock the folder; None if it has no lock, or another process has it or has removed it meanwhile."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / _LOCK, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(folder / _LOCK)  # locked, but perhaps removed just before
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None
