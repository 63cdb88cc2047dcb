"""A source of examples: the rows of its tables, one table after another, read according to its settings."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final, Protocol

from penstock.errors import DataError, InvalidRequestError
from services.trainer.data.config import SourceConfig
from services.trainer.data.rows.columns import Columns, find_columns, find_demonstration_columns
from services.trainer.data.rows.example import Example, make_demonstration, make_example
from services.trainer.data.rows.images import ImageReader
from services.trainer.data.sources.table import NUM_SHOWN_ROWS, Table

_EMPTY: Final[tuple[Any, ...]] = (None, "", [])
"""Values that do not show what a column holds."""


class _FindColumns(Protocol):
    def __call__(self, row: Mapping[str, Any], config: SourceConfig, *, name: str) -> Columns: ...


class _ReadRow(Protocol):
    def __call__(
        self, row: Mapping[str, Any], columns: Columns, config: SourceConfig, reader: ImageReader, /
    ) -> Example: ...


class Rows(Protocol):
    """Rows of a source, or of the part of it that an evaluation set plays."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, number: int, /) -> Example:
        """Read a row.

        Raises:
            DataError: it is invalid.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """The form that rows are read in: which columns are read, and how a row becomes an example."""

    name: str
    find_columns: _FindColumns
    read: _ReadRow


PROMPTS = RowForm(name="prompts", find_columns=find_columns, read=make_example)
"""Prompts to play, with the correct answers."""
EVALUATED = RowForm(name="evaluated", find_columns=find_columns, read=partial(make_example, is_evaluated=True))
"""The same in an evaluation set, where rows may choose all of their sampling."""
DEMONSTRATIONS = RowForm(name="demonstrations", find_columns=find_demonstration_columns, read=make_demonstration)
"""Conversations whose assistant messages are learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTable:
    """A table with a name."""

    table: Table
    name: str
    """Its file, for error messages."""
    images: ImageReader
    """Reads its images."""
    first_row: int = 0
    """Number in the file of its first row."""
    stamp: str = ""
    """A stamp that changes with the file and the selection of its rows."""
    form: RowForm = PROMPTS
    _columns: dict[tuple[str, ...], Columns] = field(default_factory=dict, init=False, repr=False)

    def columns(self, row: Mapping[str, Any], config: SourceConfig) -> Columns:
        """Return the columns to read from a row; in some formats, they differ between rows.

        Raises:
            DataError: a column is missing, or several could be meant.
        """
        keys = tuple(row)
        if keys not in self._columns:
            whole = {**dict.fromkeys(self.table.columns), **row}
            self._columns[keys] = self.form.find_columns(whole, config, name=self.name)
        return self._columns[keys]


class Source:
    """Examples by row number, from 0."""

    def __init__(self, name: str, tables: Sequence[NamedTable], config: SourceConfig) -> None:
        """Find the columns of each table by its first rows.

        Raises:
            DataError: there are no rows, or a table lacks a column.
        """
        self.tables = [each for each in tables if len(each.table)]
        if not self.tables:
            raise DataError(f"{name} holds no rows")
        self.name = name
        self.config = config
        found = [each.columns(_first_values(each), config) for each in self.tables]
        self.first_columns = found[0]
        """Columns of the first table's first rows."""
        self._ends = list(accumulate(len(each.table) for each in self.tables))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def budget(self) -> int | None:
        """`limits.max_tokens` of every row; None: there is none, rows may have their own, or they are no prompts."""
        if self.config.limits_column or self.tables[0].form is DEMONSTRATIONS:
            return None
        return self.config.limits.max_tokens or None

    def __getitem__(self, number: int, /) -> Example:
        """Read a row.

        Raises:
            DataError: the row is invalid.
        """
        table, index = self._locate(number)
        try:
            row = table.table[index]
            return table.form.read(row, table.columns(row, self.config), self.config, table.images)
        except (ValueError, OverflowError, InvalidRequestError, RecursionError) as error:
            raise self.wrong(number, error) from None

    def wrong(self, number: int, error: Exception) -> DataError:
        """Return an error that names the row's file and its place there."""
        table, index = self._locate(number)
        return DataError(f"{table.name}, row {table.first_row + index}: {error}; repair the row or remove it")

    def _locate(self, number: int) -> tuple[NamedTable, int]:
        at = bisect_right(self._ends, number)
        return self.tables[at], number - self._ends[at] + len(self.tables[at].table)


def _first_values(table: NamedTable) -> Mapping[str, Any]:
    """Return the first value of each column that is not empty among the first `NUM_SHOWN_ROWS` rows.

    A column of images may begin with rows that have none.

    Raises:
        DataError: none of the rows can be read.
    """
    first_error: Exception | None = None
    values: dict[str, Any] = dict.fromkeys(table.table.columns)
    is_read = False
    for number in range(min(len(table.table), NUM_SHOWN_ROWS)):
        try:
            row = table.table[number]
        except (ValueError, OverflowError, DataError) as error:
            first_error = first_error or error
            continue
        is_read = True
        values |= {key: value for key, value in row.items() if values.get(key) in _EMPTY}
        if not any(value in _EMPTY for value in values.values()):
            break
    if is_read:
        return values
    raise DataError(f"{table.name}: none of its first {NUM_SHOWN_ROWS} rows can be read; the first: {first_error}")
