"""Reads CSV files with a header."""

import csv
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from services.trainer.data.sources.readers.blocks import BlockCache
from services.trainer.data.sources.readers.jsonl import hold_whole
from services.trainer.data.sources.table import require_unique

_MAX_FIELD = 2**31 - 1
"""Images in base64 are longer than the 128 KiB that Python's reader allows a field."""


class CsvTable:
    """The rows of a CSV file, held in memory. All values are text; an empty one is None."""

    def __init__(self, file: Path, blocks: BlockCache) -> None:
        """Read the file; `blocks` has the rest of the memory.

        Raises:
            DataError: it is too large, its header names a column twice, or a row has other fields than the header.
        """
        hold_whole(file, blocks)
        csv.field_size_limit(_MAX_FIELD)
        try:
            with file.open(newline="", encoding="utf-8-sig") as opened:
                header, *rows = [row for row in csv.reader(opened) if row] or [[]]
        except (csv.Error, UnicodeDecodeError, OSError) as error:
            raise DataError(f"data.path {str(file)!r} cannot be read as CSV: {error}") from None
        wrong = next((number for number, row in enumerate(rows) if len(row) != len(header)), None)
        if wrong is not None:
            raise DataError(
                f"data.path {str(file)!r}, row {wrong}: it has {len(rows[wrong])} fields, and the header {len(header)};"
                " repair the row"
            )
        require_unique(header, file)
        self.columns = tuple(header)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        return {column: value or None for column, value in zip(self.columns, self._rows[number], strict=True)}
