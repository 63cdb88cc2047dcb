"""Reads rows of a model folder's weights, under their own names: each rank of a trainer reads those that it holds.

Rows are the first dimension, which is that of the experts of a mixture in each of their layouts.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch

from penstock.model.families.experts import is_transposed, names_of_expert
from penstock.model.families.qwen_vl import published_name
from services.trainer.backend.files.tensor_files import StoredTensors


class PublishedWeights:
    """The weights of a model folder. Use as a context."""

    def __init__(self, folder: Path, model_type: str) -> None:
        """Open the folder's safetensors files.

        Args:
            folder: The folder.
            model_type: The model's type, which says how its checkpoints name and lay out experts.

        Raises:
            OSError: there is no such folder, or a file cannot be read.
            SafetensorError: a file is not complete.
        """
        self._files = ExitStack()
        self._stored = self._files.enter_context(StoredTensors(folder))
        self._model_type = model_type

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> torch.Tensor:
        """Return some rows of a weight, in float32.

        Args:
            name: Its own name.
            shape: Its own shape, all of it.
            rows: The rows.
        """
        if not names_of_expert(name, 0, self._model_type):
            part = self._stored.rows(published_name(name, self._model_type), rows)
            part = part.transpose(1, 2) if is_transposed(name, self._model_type) else part
            return part.to(torch.float32).contiguous()
        experts = range(*rows.indices(shape[0]))
        whole = torch.empty(len(experts), *shape[1:])
        for place, expert in zip(whole, experts, strict=True):
            names = names_of_expert(name, expert, self._model_type)
            for published, into in zip(names, place.chunk(len(names)), strict=True):
                into.copy_(self._stored.rows(published_name(published, self._model_type), slice(None)))
        return whole

    def __enter__(self) -> Self:
        """Return the weights."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._files.close()
