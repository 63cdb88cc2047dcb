"""A source of examples: the rows of its tables behind each other, read as its settings say."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import DataError, InvalidRequestError
from services.trainer.data.columns import Columns, find_columns
from services.trainer.data.config import DataConfig
from services.trainer.data.example import Example, make_example
from services.trainer.data.images import ImageReader


class Table(Protocol):
    """Rows by number, from 0. May be read from any thread."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        """Read a row: its values by column."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTable:
    """A table, and what to call it."""

    table: Table
    name: str
    """Its file, for errors."""
    folder: Path
    """Paths of images are relative to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    table: Table
    name: str
    columns: Columns
    images: ImageReader


class Source:
    """Examples by row number, from 0."""

    def __init__(self, name: str, tables: Sequence[NamedTable], config: DataConfig) -> None:
        """Find the columns of each table; no other row than the first is read.

        Raises:
            DataError: there are no rows, or a table lacks a column.
        """
        tables = [each for each in tables if len(each.table)]
        if not tables:
            raise DataError(f"{name} holds no rows")
        self.name = name
        self._config = config
        self._parts = [
            _Part(
                table=each.table,
                name=each.name,
                columns=find_columns(each.table[0], config, name=each.name),
                images=ImageReader(folder=each.folder),
            )
            for each in tables
        ]
        self._ends = list(accumulate(len(part.table) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int, /) -> Example:
        """Read a row.

        Raises:
            DataError: the row is wrong.
        """
        part, row = self._locate(number)
        try:
            return make_example(part.table[row], part.columns, self._config, part.images)
        except (ValueError, InvalidRequestError) as error:
            raise self.wrong(number, error) from None

    def wrong(self, number: int, error: Exception) -> DataError:
        """Return the error that names the row's file, and its place there."""
        part, row = self._locate(number)
        return DataError(f"{part.name}, row {row}: {error}; repair the row or remove it")

    def _locate(self, number: int) -> tuple[_Part, int]:
        place = bisect_right(self._ends, number)
        part = self._parts[place]
        return part, number - self._ends[place] + len(part.table)
