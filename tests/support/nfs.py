"""Stands in for NFS, where a file that is open here is renamed in place of removed, until it is closed."""

import os
from typing import Any

import pytest


def rename_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `os.unlink` rename what this process has open, for the rest of the test."""
    unlink = os.unlink

    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        if _identity(os.lstat(path, dir_fd=dir_fd)) in _open_files():
            os.rename(path, os.path.join(os.path.dirname(path), ".nfs0001"), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", remove)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _open_files() -> set[tuple[int, int]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(_identity(os.fstat(int(number))))
        except OSError:  # that of the listing itself
            continue
    return found
