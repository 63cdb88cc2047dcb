"""A folder that a benchmark keeps its runs in."""

import argparse
from pathlib import Path


def new_folder(name: str) -> Path:
    """Return a folder without anything in it, as the `type` of an option: a measurement reads all of its folder.

    Raises:
        ArgumentTypeError: something is there already.
    """
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{folder} is not empty: remove it, or name a new folder")
    return folder
