"""Files that are on the disk for certain, and a full disk, told to people as what it is."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import SetupError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The device is full, the user's quota is, or the file has its largest size."""
_MIB = 2**20


def is_disk_full(error: BaseException) -> bool:
    """Whether there was no room for what was written."""
    return isinstance(error, OSError) and error.errno in _FULL


def free_mib(folder: Path) -> str:
    """The free space of the disk that `folder` is on, with its unit."""
    return f"{shutil.disk_usage(folder).free / _MIB:,.0f} MiB"


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_full_told(folder: Path, remedy: str) -> Iterator[None]:
    """Say in one line that the disk of `folder`, which exists, is full.

    Of errors of several tasks, those that a full disk did not cause are raised instead: they say more.

    Raises:
        SetupError: the disk is full; the message ends with `remedy`.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        full: BaseException = error
    except BaseExceptionGroup as group:
        found, others = group.split(is_disk_full)
        if found is None:
            raise
        if others is not None:
            raise others from None
        full = found
        while isinstance(full, BaseExceptionGroup):
            full = full.exceptions[0]
    else:
        return
    raise SetupError(f"{folder}: {full}; {free_mib(folder)} are free there; {remedy}") from None
