"""Lengths of a source's prompts and the budgets of its rows, measured once and kept in a file.

Invariant: a file is used only for the same rows, read with the same settings, for the same model: its name is a digest
of all three. Image files beside the data are not part of the digest.
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import numpy as np
import structlog

from penstock.runtime.files import write_atomically
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.source import Source

log = structlog.get_logger()

UNKNOWN: Final = -1
MIN_KEPT_ROWS: Final = 500
"""Sources with fewer rows are measured again each time, which takes a second."""
_FORMAT = 4
"""Version of the files and of how rows are measured."""
_UNREADABLE = (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What numpy raises for a missing, truncated or damaged file; zipfile raises RuntimeError for a damaged header."""
_MODEL_FILES = (
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)


class Lengths:
    """Tokens of each row's prompt, images expanded; `UNKNOWN` where not measured."""

    def __init__(self, num_rows: int, file: Path | None = None) -> None:
        """Start with nothing known; `save` writes to `file`, if one is given."""
        self.num_tokens = np.full(num_rows, UNKNOWN, dtype=np.int32)
        self.images_put_first = np.zeros(num_rows, dtype=bool)
        """Rows whose images were put before the text because it has no marks."""
        self._budgets = np.zeros(num_rows, dtype=np.int64)
        """`limits.max_tokens` of the episodes of each row that was measured; 0: none."""
        self._file = file

    @classmethod
    def open(cls, source: Source, folder: Path, model: str) -> Self:
        """Read the known lengths of a source.

        Args:
            source: The rows.
            folder: Folder with the files of all sources.
            model: `model_digest`, or "" if prompts are not measured.
        """
        if len(source) < MIN_KEPT_ROWS:
            return cls(len(source))
        identity = [
            _FORMAT,
            source.config.model_dump(mode="json", exclude={"weight"}),
            [(table.form.name, table.stamp) for table in source.tables],
            model,
        ]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        lengths = cls(len(source), folder / "lengths" / f"{digest}.npz")
        lengths._read()
        return lengths

    def add(self, number: int, example: Example, num_tokens: int) -> None:
        """Note that row `number` is `example`, whose prompt has `num_tokens` tokens."""
        self.num_tokens[number] = num_tokens
        self.images_put_first[number] = example.images_put_first
        self._budgets[number] = example.limits.max_tokens or 0

    def budget(self, number: int) -> int | None:
        """Return `limits.max_tokens` of row `number`'s episodes; None: it has none, or was not measured."""
        return int(self._budgets[number]) or None

    def is_overlong(self, room: Callable[[int | None], int]) -> np.ndarray:
        """Return for each row whether its prompt is known to be too long, as bool[rows].

        Args:
            room: The most tokens of a prompt, given `limits.max_tokens` of its episodes; None: no budget.
        """
        budgets, budget_of_row = np.unique(self._budgets, return_inverse=True)
        rooms = np.array([room(int(budget) or None) for budget in budgets])
        return self.num_tokens > rooms[budget_of_row]

    def save(self) -> None:
        """Write the file; if the folder cannot be written, only log it."""
        if self._file is None:
            return
        content = io.BytesIO()
        np.savez_compressed(
            content, num_tokens=self.num_tokens, images_put_first=self.images_put_first, budgets=self._budgets
        )
        try:
            write_atomically(self._file, content.getvalue())
        except OSError as error:
            log.warning("data.lengths_not_kept", file=str(self._file), reason=str(error))

    def _read(self) -> None:
        assert self._file is not None
        try:
            with self._file.open("rb") as opened, np.load(opened) as kept:
                num_tokens, images_put_first, budgets = kept["num_tokens"], kept["images_put_first"], kept["budgets"]
        except _UNREADABLE:
            return  # missing or damaged: it is created again
        if len(num_tokens) == len(self.num_tokens):
            self.num_tokens, self.images_put_first, self._budgets = num_tokens, images_put_first, budgets


def model_digest(folder: Path) -> str:
    """Return a digest of the model's files that determine the length of a prompt."""
    digest = hashlib.sha256()
    for name in _MODEL_FILES:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
