"""Reads rows of Arrow tables as Python values, including the files that `datasets.save_to_disk` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from services.trainer.data.sources.table import require_unique


class RowDecoder:
    """Turns rows of tables with one schema into Python values."""

    def __init__(self, schema: Any) -> None:
        """Decode rows of tables with this schema."""
        self.columns: Sequence[str] = tuple(schema.names)
        self._short = {field.name: field.type for field in schema if _has_short_float(field.type)}

    def row(self, table: Any, number: int) -> dict[str, Any]:
        """Return one row as values by column."""
        row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
        return row | {name: _shortest(row[name], kind) for name, kind in self._short.items()} if self._short else row


class ArrowTable:
    """The rows of an Arrow file, in the stream or the file format. The file is memory-mapped."""

    def __init__(self, file: Path) -> None:
        """Map the file.

        Raises:
            DataError: it is not in an Arrow format, or names a column twice.
        """
        import pyarrow
        import pyarrow.ipc

        try:
            try:
                self._table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
            except pyarrow.ArrowInvalid:
                self._table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"data.path {str(file)!r} cannot be read as Arrow: {error}") from None
        require_unique(self._table.schema.names, file)
        self._decoder = RowDecoder(self._table.schema)

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns."""
        return self._decoder.columns

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        return self._decoder.row(self._table, number)


def _has_short_float(kind: Any) -> bool:
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        return True
    return any(_has_short_float(kind.field(number).type) for number in range(kind.num_fields))


def _shortest(value: Any, kind: Any) -> Any:
    """Return the value with every float of less than 64 bits as the shortest decimal that it represents: 0.1 is 0.1."""
    import numpy as np
    from pyarrow import types

    if value is None or not _has_short_float(kind):
        return value
    if types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_shortest(each, kind.value_type) for each in value]
    if types.is_float16(kind):
        return float(str(np.float16(value)))
    return float(str(np.float32(value))) if types.is_float32(kind) else value
