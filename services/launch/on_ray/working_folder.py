"""The folder in which a run's processes look for relative paths."""

import os
from pathlib import Path


def working_folder(launchers: str) -> str:
    """Return the launcher's working directory if this host has it, else this process's own.

    A submitted job's folder is at the same path on every host, because Ray unpacks it there.
    """
    return launchers if Path(launchers).is_dir() else os.getcwd()
