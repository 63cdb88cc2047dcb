"""Removes the folder of a run, and its weight files elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError, SetupError
from penstock.weights.version_folders import remove_versions
from services.cli.runs.folders import FolderOfRun, read_folder, without_bus
from services.launch.run_folder import RunFolder
from services.view.run_reader import RunReader


def newer_folders(found: FolderOfRun) -> list[str]:
    """Return later runs of the same name on the same NATS, in the same parent folder: what NATS stores is theirs.

    A run whose recipe does not say where its NATS is may be on the same one.
    """
    here = found.folder.path.absolute()
    others = (file.parent for file in sorted(here.parent.glob("*/config.toml")) if file.parent != here)
    return [str(path) for path in others if _may_be_newer(path, found)]


def _may_be_newer(path: Path, found: FolderOfRun) -> bool:
    try:
        other = read_folder(path)
        is_elsewhere = set(other.bus.servers) != set(found.bus.servers)
    except ConfigError:
        other, is_elsewhere = without_bus(path), False
    return not is_elsewhere and other.run == found.run and other.started_at > found.started_at


@contextmanager
def deleting(found: FolderOfRun) -> Iterator[None]:
    """Keep launchers out during the context, then remove the folder.

    Its weight files elsewhere go too, and the addresses for Prometheus that its processes left beside it.

    Raises:
        SetupError: a launcher or a trainer works in the folder, or a file cannot be removed.
    """
    folder = found.folder
    with folder.locked():  # before the look, which gives up on a file system that does not answer
        _require_no_trainer(folder)
        yield
        _require_no_trainer(folder)  # one without a launcher may have been started meanwhile
        folder.forget_targets()
        with _removal_reported(folder):
            if found.weight_files is not None:
                remove_versions(found.weight_files)
                _require_no_trainer(folder)
            folder.clear()
    with _removal_reported(folder):
        folder.remove_cleared()


def _require_no_trainer(folder: RunFolder) -> None:
    if RunReader(folder.path).has_trainer:
        raise SetupError(f"a trainer is running in {folder.path}; stop the run first")


@contextmanager
def _removal_reported(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"{error.filename or folder.path} cannot be removed: {error.strerror}; end what uses it, or change its "
            "owner or rights, and delete the run again"
        ) from None
