"""Files in which SGLang's processes keep their metrics, with their blocks on the disk.

prometheus_client extends such a file without blocks and writes to it through memory. If the disk has no room for a
block then, the kernel ends the process by SIGBUS, without a word. Invariant: a file has its blocks before it is mapped,
so that a full disk is an OSError that names the file.
"""

import os
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_FILE = "prometheus_client.mmap_dict.MmapedDict"
_MAX_ENTRY_BYTES = 4 + 8 + 16
"""Bytes of an entry beside its key: the key's length, padding, value and time."""


def register() -> None:
    """Register the hooks."""
    HookRegistry.register(_FILE + ".__init__", _reserve_file, HookType.BEFORE)
    HookRegistry.register(_FILE + "._init_value", _reserve_entry, HookType.BEFORE)


def _reserve_file(_file: Any, path: str, read_mode: bool = False) -> None:
    """Hook before a file is opened."""
    from prometheus_client import mmap_dict  # not before a plain SGLang has decided where it keeps its metrics

    if not read_mode:
        _reserve(path, mmap_dict._INITIAL_MMAP_SIZE)


def _reserve_entry(file: Any, key: str) -> None:
    """Hook before an entry is added; the file is doubled until it has room."""
    needed, size = file._used + len(key.encode()) + _MAX_ENTRY_BYTES, file._capacity
    while size < needed:
        size *= 2
    if size > file._capacity:
        _reserve(file._fname, size)


def _reserve(path: str, size_bytes: int) -> None:
    """Extend the file to this size, if it is smaller, and give it all its blocks.

    Raises:
        OSError: the disk is full.
    """
    # Its own descriptor: where posix_fallocate writes the blocks, it refuses one that appends, as theirs does.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)
