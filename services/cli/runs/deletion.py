"""Removes the folder of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import SetupError
from services.cli.runs.folders import FolderOfRun, read_folder
from services.launch.run_folder import RunFolder


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


@contextmanager
def deleting(folder: RunFolder) -> Iterator[None]:
    """Keep launchers out during the context, then remove the folder.

    The addresses for Prometheus that its processes left beside it go too.

    Raises:
        SetupError: a launcher uses the folder, or a file cannot be removed.
    """
    with folder.locked():
        yield
        folder.forget_targets()
        with _removal_reported(folder):
            folder.clear()
    with _removal_reported(folder):
        folder.remove_cleared()


@contextmanager
def _removal_reported(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"{error.filename or folder.path} cannot be removed: {error.strerror}; end what uses it, or change its "
            "owner or rights, and delete the run again"
        ) from None
