"""Folders of weight files, one for each version, below the folder of their run."""

import re
import shutil
import uuid
from pathlib import Path

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


def remove_versions(parent: Path) -> None:
    """Remove all versions below `parent`, and `parent` unless it holds other files.

    Raises:
        OSError: a file cannot be removed.
    """
    for folder in (*unfinished_folders(parent), *complete_folders(parent)):
        shutil.rmtree(folder)
    if not any(parent.iterdir()):
        parent.rmdir()
