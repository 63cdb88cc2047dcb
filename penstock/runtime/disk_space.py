"""Durable writes, and plain errors for a full disk."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from penstock.errors import SetupError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The device is full, the user's quota is used up, or the file has its largest size."""
_MIB = 2**20


def is_disk_full(error: BaseException) -> TypeGuard[OSError]:
    """Return whether a write failed because there was no room."""
    return isinstance(error, OSError) and error.errno in _FULL


def free_mib(folder: Path) -> str:
    """Return the free space of the disk that holds `folder`, or that will, with its unit."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return f"{shutil.disk_usage(existing).free / _MIB:,.0f} MiB"


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk before returning."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_full_reported(folder: Path, remedy: str | Callable[[], str]) -> Iterator[None]:
    """Report in one line that the disk of `folder` is full.

    From errors of several tasks, any that a full disk did not cause are raised instead, because they say more.

    Args:
        folder: Where the context writes.
        remedy: What a person must do; a function is called once the disk is full, and returns it.

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
    said = remedy if isinstance(remedy, str) else remedy()
    raise SetupError(f"{folder}: {full}; {free_mib(folder)} are free there; {said}") from None
