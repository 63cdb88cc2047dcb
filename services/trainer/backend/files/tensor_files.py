"""Writes a checkpoint's tensors. A full or failing disk raises OSError, whatever the libraries raise."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

_OS_ERROR = re.compile(r"(?P<reason>.*) \(os error (?P<number>\d+)\)")


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write `state` for `torch.load`.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__  # torch closes its archive after a failed write, which raises another error
        raise cause if isinstance(cause, OSError) else error from None


@contextmanager
def writing_safetensors() -> Iterator[None]:
    """Write safetensors files.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        yield
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found["number"]), found["reason"]) from None
