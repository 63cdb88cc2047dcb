"""A folder for the temporary files of this process and its children, removed with it, even after kill -9.

SGLang makes a file for each of its sockets and ends its processes by SIGKILL, so neither these files nor its segments
of shared memory are removed. The segments are noted in the folder and removed with it. A socket's path has at most 107
characters, so the folder is in /tmp where TMPDIR leaves too few. Invariant: a folder whose process has ended is removed
by the next process that makes one in the same place. A folder in use, or not made here, is never removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import SetupError

_PREFIX = "penstock-engine-"
_MAX_PARENT_CHARS = 107 - len(f"/{_PREFIX}xxxxxxxx") - len("/tmpxxxxxxxxxxx")
"""Longest path of the parent folder: Linux's limit for a socket, less the names of the folder and the socket."""
_SHORT_PARENT = Path("/tmp")
_LOCK = ".penstock-engine.lock"
"""The file that the folder's process has locked. A folder without it belongs to another program, whatever its name."""
_SEGMENTS = ".shared-memory"
"""The file that names segments of shared memory."""
_SHARED_MEMORY = Path("/dev/shm")
_OF_SGLANG = ("sgl_shm_", "sglang_loads_")
"""Prefixes of the names of SGLang's segments."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Use a new folder as TMPDIR during the context, and remove those that dead processes left.

    It sets the environment variable, for children, and `tempfile.tempdir`, for this process.

    Raises:
        SetupError: no file can be locked where the folder is.
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
        _remove(folder)
        os.close(lock)


def note_segments(folder: Path) -> None:
    """Note SGLang's segments that this process and its children map, to be removed with the folder."""
    names = set[str]()
    for pid in _family(os.getpid()):
        with contextlib.suppress(OSError):
            mapped = (line.split(maxsplit=5)[5:] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
            names.update(Path(path).name for [path] in filter(None, mapped) if path.startswith(f"{_SHARED_MEMORY}/"))
    (folder / _SEGMENTS).write_text("\n".join(sorted(name for name in names if name.startswith(_OF_SGLANG))))


def _family(pid: int) -> Iterator[int]:
    """Yield the process and all its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _family(int(child))


def _make(parent: Path) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock until it is closed or the process ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            return folder, _lock(folder, os.O_RDWR | os.O_CREAT)
        except (BlockingIOError, FileNotFoundError):  # another process takes it for abandoned
            continue
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SetupError(
                f"no file in {parent} can be locked: {error.strerror}; set TMPDIR to a folder on a local disk with room"
            ) from None


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = _lock(folder, os.O_RDWR)
            _remove(folder)
            os.close(lock)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        noted = (folder / _SEGMENTS).read_text().splitlines() if folder.stat().st_uid == os.getuid() else []
        for name in noted:
            if name.startswith(_OF_SGLANG) and "/" not in name:
                (_SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, flags: int) -> int:
    """Lock the folder; return the descriptor that holds the lock.

    Raises:
        FileNotFoundError: it has no lock file, or another process has removed it.
        BlockingIOError: another process holds the lock.
        OSError: the lock file cannot be written or locked.
    """
    descriptor = os.open(folder / _LOCK, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder / _LOCK)  # the folder may have been removed just before the lock
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
