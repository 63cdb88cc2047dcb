"""Lengths of a source's prompts, measured once and kept in a file.

Invariant: a file is used only for the same rows, read with the same settings, for the same model: its name is a digest
of all of them. Images in files of their own, beside the data, are not part of the digest.
"""

import hashlib
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Final, Self

import numpy as np
import structlog

from services.trainer.data.sources.downloads import write_atomically
from services.trainer.data.sources.source import Source

log = structlog.get_logger()

UNKNOWN: Final = -1
MIN_KEPT_ROWS: Final = 500
"""Fewer rows are measured again each time: that takes a second."""
_FORMAT = 1
"""Another number for another meaning of the files."""
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
    """Tokens of each row's prompt, images expanded; `UNKNOWN` where nobody has measured."""

    def __init__(self, num_rows: int, file: Path | None = None) -> None:
        """Nothing is known yet; `save` writes to `file`, if one is given."""
        self.num_tokens = np.full(num_rows, UNKNOWN, dtype=np.int32)
        self.images_put_first = np.zeros(num_rows, dtype=bool)
        """Of which rows the images were put before the text, for lack of marks."""
        self._file = file

    @classmethod
    def open(cls, source: Source, folder: Path, model: str) -> Self:
        """Read what is known of a source.

        Args:
            source: The rows.
            folder: Holds the files of all sources.
            model: `model_digest`, or "" where prompts are not measured.
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

    def save(self) -> None:
        """Write the file; a folder that cannot be written is only logged."""
        if self._file is None:
            return
        content = io.BytesIO()
        np.savez_compressed(content, num_tokens=self.num_tokens, images_put_first=self.images_put_first)
        try:
            write_atomically(self._file, content.getvalue())
        except OSError as error:
            log.warning("data.lengths_not_kept", file=str(self._file), reason=str(error))

    def _read(self) -> None:
        assert self._file is not None
        try:
            with self._file.open("rb") as opened, np.load(opened) as kept:
                num_tokens, images_put_first = kept["num_tokens"], kept["images_put_first"]
        except _UNREADABLE:
            return  # there is none, or it is damaged: it is made anew
        if len(num_tokens) == len(self.num_tokens):
            self.num_tokens, self.images_put_first = num_tokens, images_put_first


def model_digest(folder: Path) -> str:
    """Digest of the model's files that decide how long a prompt is."""
    digest = hashlib.sha256()
    for name in _MODEL_FILES:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
