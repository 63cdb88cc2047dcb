"""Parquet files."""

from pathlib import Path
from typing import Any

from penstock.errors import DataError


class ParquetTable:
    """The rows of one file. Opening it decodes nothing."""

    def __init__(self, file: Path) -> None:
        """Open the file.

        Raises:
            DataError: it is not Parquet.
        """
        import pyarrow
        import pyarrow.parquet

        try:
            self._table = pyarrow.parquet.read_table(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"data.path {str(file)!r} cannot be read as Parquet: {error}") from None
        self._inexact = {field.name: field.type for field in self._table.schema if _has_short_float(field.type)}

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        row: dict[str, Any] = self._table.slice(number, 1).to_pylist()[0]
        return row | {name: _shortest(row[name], kind) for name, kind in self._inexact.items()}


def _has_short_float(kind: Any) -> bool:
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        return True
    return any(_has_short_float(kind.field(number).type) for number in range(kind.num_fields))


def _shortest(value: Any, kind: Any) -> Any:
    """The value with every float of less than 64 bits as the shortest decimal that it stands for: 0.1 stays 0.1."""
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
