"""Imports modules whose packages only some installations have."""

import importlib
from typing import Any

from penstock.errors import SetupError


def import_with_extra(module: str, command: str, *, extra: str) -> Any:
    """Import `module` for a user's `command`.

    Raises:
        SetupError: a package is not installed; the message names the extra of `penstock` that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("penstock", "services"):
            raise
        raise SetupError(
            f"`{command}` needs the Python package {error.name!r}, which is not installed; "
            f"`pip install 'penstock[{extra}]'`"
        ) from None
