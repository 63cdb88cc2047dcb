"""Imports of large modules, and of those whose packages only some installations have."""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import SetupError


@contextmanager
def kept_for_ever() -> Iterator[None]:
    """Exempt all objects made in this context from garbage collection for good: modules and classes are never garbage.

    Importing torch or SGLang makes about a million objects; scanning them repeatedly takes a fifth of their import
    time. All other objects that the process has by then are exempt too, so use it early in its own process. It changes
    nothing if collection is disabled anyway.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


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


@contextmanager
def torch_hidden() -> Iterator[None]:
    """Hide torch from transformers, which must be imported for the first time during the context.

    transformers imports torch if it is installed. That costs seconds of start-up and half a gigabyte, for a tokenizer
    that does not need it. Does nothing if torch or transformers is imported already, for example by an environment.
    Afterwards torch can be imported as usual; only transformers runs without it.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python spells "cannot be imported"
    try:
        yield
    finally:
        del sys.modules["torch"]
