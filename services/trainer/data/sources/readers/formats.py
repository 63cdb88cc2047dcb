"""Opens files by format, which the end of the file's name gives."""

from pathlib import Path
from typing import Final

from penstock.errors import DataError
from services.trainer.data.sources.readers.arrow import ArrowTable
from services.trainer.data.sources.readers.blocks import BlockCache
from services.trainer.data.sources.readers.csv import CsvTable
from services.trainer.data.sources.readers.jsonl import LinesTable, open_json, open_zipped_json
from services.trainer.data.sources.readers.parquet import ParquetTable
from services.trainer.data.sources.table import Table

SUFFIXES: Final = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz")
"""Readable suffixes, in order of preference if a split has files of several."""


def open_table(file: Path, blocks: BlockCache) -> Table:
    """Open a file.

    Args:
        file: The file; its suffix gives the format.
        blocks: Counts what of all files is kept in memory.

    Raises:
        DataError: the suffix is unknown, the file is not in the format of its suffix, or there is no room for it.
    """
    if file.name.lower().endswith((".jsonl.gz", ".json.gz")):
        return open_zipped_json(file, blocks)
    match file.suffix.lower():
        case ".parquet":
            return ParquetTable(file, blocks)
        case ".arrow":
            return ArrowTable(file)
        case ".jsonl":
            return LinesTable(file)
        case ".json":
            return open_json(file, blocks)
        case ".csv":
            return CsvTable(file, blocks)
    raise DataError(f"data.path {str(file)!r}: its format is not known by its name; use {', '.join(SUFFIXES)}")
