"""Tables: rows by number, the interface of each reader."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.errors import DataError

NUM_SHOWN_ROWS: Final = 100
"""Rows of a table that are searched for its columns. Later rows may have others, which are found when they are read."""


class Table(Protocol):
    """Rows by number, from 0. May be read from any thread."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns; in some formats, rows may have others."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        """Read a row: its values by column.

        Raises:
            DataError: the file is damaged there.
            ValueError, OverflowError: a value does not fit its column's type, such as text that is not UTF-8.
        """
        ...


class Slice:
    """Consecutive rows of a table."""

    def __init__(self, table: Table, rows: range) -> None:
        """Select the rows of `table` in `rows`."""
        self.columns = table.columns
        self.rows = rows
        self._table = table

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        return self._table[self.rows[number]]


def require_unique(columns: Sequence[str], file: Path) -> None:
    """Reject a file with two columns of the same name: a row would hold only the last one.

    Raises:
        DataError: two columns have the same name.
    """
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise DataError(
            f"data.path {str(file)!r} has several columns called {twice[0]!r}; rename or remove all but one"
        )
