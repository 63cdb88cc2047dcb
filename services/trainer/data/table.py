"""Rows by number: what each reader makes of a file."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Table(Protocol):
    """Rows by number, from 0. May be read from any thread."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns' names; rows of some formats may have others."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        """Read a row: its values by column.

        Raises:
            DataError: the file is damaged there.
        """
        ...


class Slice:
    """Consecutive rows of a table."""

    def __init__(self, table: Table, rows: range) -> None:
        """The rows of `table` in `rows`."""
        self.columns = table.columns
        self.rows = rows
        self._table = table

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        return self._table[self.rows[number]]
