"""Writes and reads a checkpoint's tensors. A full or failing disk raises OSError, whatever the libraries raise."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from services.trainer.backend.files.file_plan import PlannedFile

_OS_ERROR = re.compile(r"\(os error (?P<number>\d+)\)")


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


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None) -> None:
    """Write a safetensors file with the rights that the umask gives a new one; the library's has mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found["number"])
        raise OSError(number, os.strerror(number)) from None
    path.chmod(mode)


def _unchanged(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor)]


def write_share(
    files: Sequence[PlannedFile],
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    rank: int,
    stored: Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]] = _unchanged,
) -> list[Path]:
    """Write one rank's files into `folder`, whose parent must exist, and return them.

    Args:
        files: Those of all ranks.
        tensors: Those that the rank owns, by name.
        folder: Made if no other rank has made it.
        rank: The rank.
        stored: Names and tensors under which a tensor is stored.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    written = []
    for file in files:
        if file.rank != rank:
            continue
        contents = {
            name: part.contiguous() for each in file.tensors for name, part in stored(each, tensors[each].detach())
        }
        save_tensors(contents, folder / file.name, metadata={"format": "pt"})
        written.append(folder / file.name)
    return written


class StoredTensors:
    """The tensors of a folder's safetensors files, of which only what is asked for is read. Use as a context."""

    def __init__(self, folder: Path) -> None:
        """Read the names.

        Raises:
            OSError: there is no such folder, or a file cannot be read.
        """
        self._files = ExitStack()
        self._holding: dict[str, Any] = {}
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                file = self._files.enter_context(safe_open(path, framework="pt"))
                self._holding |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._holding)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return a copy of some rows of a tensor, which has at least one dimension."""
        is_empty = rows.start is not None and rows.start == rows.stop
        part: torch.Tensor = self._holding[name].get_slice(name)[slice(1) if is_empty else rows]
        return part[:0].clone() if is_empty else part.clone()  # safetensors refuses an empty slice at the end

    def __enter__(self) -> Self:
        """Return the tensors."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._files.close()
