"""Reads Parquet files by row group."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from services.trainer.data.sources.readers.arrow import RowDecoder
from services.trainer.data.sources.readers.blocks import BlockCache
from services.trainer.data.sources.table import require_unique


class ParquetTable:
    """The rows of one file. Opening it decodes nothing; reading a row decodes its row group."""

    def __init__(self, file: Path, blocks: BlockCache) -> None:
        """Open the file; `blocks` holds its row groups.

        Raises:
            DataError: it is not Parquet, names a column twice, or a row group is larger than `blocks` may hold.
        """
        import pyarrow
        import pyarrow.parquet

        self._name = f"data.path {str(file)!r}"
        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                self._metadata = opened.metadata
                self._decoder = RowDecoder(opened.schema_arrow)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._name} cannot be read as Parquet: {error}") from None
        require_unique(self._decoder.columns, file)
        self._file = file
        self._blocks = blocks
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._sizes = [group.total_byte_size for group in groups]
        if self._sizes and max(self._sizes) > blocks.max_bytes:
            raise DataError(
                f"{self._name} has a row group of {max(self._sizes)} bytes, more than data.memory_gib = "
                f"{blocks.max_bytes / 2**30:g} allows; raise it, or write the file in smaller row groups "
                "(pyarrow.parquet.write_table(..., row_group_size=1000))"
            )

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns."""
        return self._decoder.columns

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        import pyarrow

        group = bisect_right(self._ends, number)
        first = self._ends[group - 1] if group else 0
        try:
            block = self._blocks.get((id(self), group), lambda: self._read(group), num_bytes=self._sizes[group])
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self._name}, rows {first} to {self._ends[group] - 1}: {error}; repair the file"
            ) from None
        return self._decoder.row(block, number - first)

    def _read(self, group: int) -> Any:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._file, metadata=self._metadata) as opened:
            return opened.read_row_group(group)
