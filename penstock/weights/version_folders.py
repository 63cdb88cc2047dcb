"""Folders of weight files, one for each version, below the folder of their run."""

import re
import shutil
import uuid
from pathlib import Path

from penstock.runtime.files import write_atomically

_OWNER = "run"
"""File with the run folder whose versions these are: run folders in several places may have one name."""
_COMPLETE = re.compile(r"v(\d{8,})")
_UNFINISHED = re.compile(r"\.v\d{8,}-[0-9a-f]{8}")


def version_folder(parent: Path, version: int) -> Path:
    """Return the folder of `version`."""
    return parent / f"v{version:08d}"


def unfinished_folder(parent: Path, version: int) -> Path:
    """Return a new folder in which `version` is written."""
    return parent / f".{version_folder(parent, version).name}-{uuid.uuid4().hex[:8]}"


def complete_folders(parent: Path) -> list[Path]:
    """Return the folders of the versions below `parent`, the oldest first."""
    return sorted(path for path in parent.iterdir() if _COMPLETE.fullmatch(path.name))


def unfinished_folders(parent: Path) -> list[Path]:
    """Return the folders below `parent` whose writer was killed, or still writes."""
    return [path for path in parent.iterdir() if _UNFINISHED.fullmatch(path.name)]


def claim(parent: Path, run_folder: Path) -> None:
    """Note that the versions below `parent`, which need not exist, are of the run in `run_folder`, an absolute path.

    Raises:
        OSError: it cannot be written.
    """
    if not belongs_to(parent, run_folder):
        parent.mkdir(parents=True, exist_ok=True)
        write_atomically(parent / _OWNER, f"{run_folder}\n".encode())


def belongs_to(parent: Path, run_folder: Path) -> bool:
    """Return whether the run in `run_folder` was the last that claimed `parent`; False if that cannot be read."""
    try:
        return (parent / _OWNER).read_text() == f"{run_folder}\n"
    except (OSError, ValueError):
        return False


def remove_versions(parent: Path) -> None:
    """Remove all versions below `parent` and the note whose they are, and `parent` unless it holds other files.

    Raises:
        OSError: a file cannot be removed.
    """
    for folder in (*unfinished_folders(parent), *complete_folders(parent)):
        shutil.rmtree(folder)
    (parent / _OWNER).unlink(missing_ok=True)
    if not any(parent.iterdir()):
        parent.rmdir()
