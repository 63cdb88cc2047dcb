"""Removes the folder of a run."""

import shutil

from penstock.errors import SetupError
from services.cli.runs.folders import FolderOfRun, read_folder


def newer_folders(found: FolderOfRun) -> list[str]:
    """Return later runs of the same name on the same NATS, in the same parent folder: what NATS stores is theirs."""
    here = found.folder.path.absolute()
    others = (read_folder(file.parent) for file in sorted(here.parent.glob("*/config.toml")) if file.parent != here)
    return [
        str(each.folder.path)
        for each in others
        if (each.run, set(each.bus.servers)) == (found.run, set(found.bus.servers))
        and each.started_at > found.started_at
    ]


def delete_folder(found: FolderOfRun) -> None:
    """Remove the folder, and the addresses for Prometheus that its processes left beside it.

    Raises:
        SetupError: a file cannot be removed.
    """
    found.folder.forget_targets()
    try:
        shutil.rmtree(found.folder.path)
    except OSError as error:
        raise SetupError(
            f"{error.filename or found.folder.path} cannot be removed: {error.strerror}; change its owner or rights, "
            "and delete the run again"
        ) from None
