"""Reads JSON Lines, and JSON files that hold a list of objects."""

import abc
import gzip
import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import DataError
from services.trainer.data.sources.readers.blocks import BlockCache
from services.trainer.data.sources.table import NUM_SHOWN_ROWS


class _Lines(abc.ABC):
    """JSON objects, one per line. A line that is not an object is an invalid row, not an invalid file."""

    columns: Sequence[str]

    def __init__(self, file: Path) -> None:
        self._file = file

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of lines that are not empty."""

    @abc.abstractmethod
    def _line(self, number: int) -> bytes:
        """Read a line."""

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        try:
            return _object(json.loads(self._line(number)))
        except OSError as error:
            raise DataError(f"data.path {str(self._file)!r} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"data.path {str(self._file)!r}, row {number}: it is not a JSON object: {error}; repair the line"
            ) from None

    def _shown_keys(self) -> Sequence[str]:
        """Return the keys of the first rows."""
        rows = []
        for number in range(min(len(self), NUM_SHOWN_ROWS)):
            with suppress(DataError):  # the row is rejected or dropped when it is played
                rows.append(self[number])
        return _keys(rows)


class LinesTable(_Lines):
    """A file with one JSON object per line. Memory holds only the offsets of the lines."""

    def __init__(self, file: Path) -> None:
        """Find the lines, skipping empty ones.

        Raises:
            DataError: the file cannot be read.
        """
        super().__init__(file)
        self._starts = array("q")
        self._lengths = array("q")
        try:
            with file.open("rb") as opened:
                self._index(opened)
        except OSError as error:
            raise DataError(f"data.path {str(file)!r} cannot be read: {error.strerror}") from None
        self.columns = self._shown_keys()

    def __len__(self) -> int:
        return len(self._starts)

    def _line(self, number: int) -> bytes:
        with self._file.open("rb") as opened:
            opened.seek(self._starts[number])
            return opened.read(self._lengths[number])

    def _index(self, opened: BinaryIO) -> None:
        offset = 0
        for line in opened:
            if line.strip():
                self._starts.append(offset)
                self._lengths.append(len(line))
            offset += len(line)


class HeldLinesTable(_Lines):
    """Unparsed lines, held in memory, of a file that cannot be read from the middle."""

    def __init__(self, file: Path, content: bytes) -> None:
        """Hold the lines of a file's `content`, without empty ones."""
        super().__init__(file)
        self._held = [line for line in content.split(b"\n") if line.strip()]
        self.columns = self._shown_keys()

    def __len__(self) -> int:
        return len(self._held)

    def _line(self, number: int) -> bytes:
        return self._held[number]


class ListTable:
    """A file that is one JSON list of objects, held in memory."""

    def __init__(self, file: Path, rows: Any) -> None:
        """Hold the rows of a file.

        Raises:
            DataError: they are not a list of objects.
        """
        try:
            if not isinstance(rows, list):
                raise ValueError(f"it holds {type(rows).__name__}")
            self._rows = [_object(row) for row in rows]
        except ValueError as error:
            raise DataError(f"data.path {str(file)!r} is not a JSON list of objects: {error}") from None
        self.columns = _keys(self._rows[:NUM_SHOWN_ROWS])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        return self._rows[number]


def open_json(file: Path, blocks: BlockCache) -> LinesTable | ListTable:
    """Open a `.json` file: a list, which is held in memory, if it begins as one, else lines.

    Raises:
        DataError: as for the two tables.
    """
    try:
        with file.open("rb") as opened:
            is_list = opened.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except OSError as error:
        raise DataError(f"data.path {str(file)!r} cannot be read: {error.strerror}") from None
    if not is_list:
        return LinesTable(file)
    hold_whole(file, blocks)
    try:
        return ListTable(file, json.loads(file.read_bytes()))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"data.path {str(file)!r} is not a JSON list of objects: {error}") from None


def open_zipped_json(file: Path, blocks: BlockCache) -> HeldLinesTable | ListTable:
    """Open a `.json.gz` or `.jsonl.gz` file: a list if it begins as one, else lines. It is held in memory.

    Raises:
        DataError: it is not a gzip file, is too large when unzipped, or holds no objects.
    """
    max_bytes = blocks.num_free_bytes
    try:
        with gzip.open(file) as opened:
            content = opened.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.path {str(file)!r} cannot be unzipped: {error}") from None
    if len(content) > max_bytes:
        raise DataError(
            f"data.path {str(file)!r} has more than {max_bytes} bytes when unzipped, and is read as a whole"
            f"{_beside(blocks)}; unzip it to .jsonl, which is read row by row, or raise data.memory_gib"
        )
    blocks.hold(len(content))
    text = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith(b"["):
        return HeldLinesTable(file, text)
    try:
        return ListTable(file, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(f"data.path {str(file)!r} is not JSON: {error}") from None


def hold_whole(file: Path, blocks: BlockCache) -> None:
    """Count a file that must be read as a whole in `blocks`, with which it shares the memory.

    Raises:
        DataError: it is too large, by itself or beside others.
    """
    num_bytes = file.stat().st_size
    if num_bytes > blocks.num_free_bytes:
        raise DataError(
            f"data.path {str(file)!r} has {num_bytes} bytes and must be read as a whole{_beside(blocks)}; convert it "
            "to .jsonl or .parquet, which are read row by row, or raise data.memory_gib"
        )
    blocks.hold(num_bytes)


def _beside(blocks: BlockCache) -> str:
    return f", beside {blocks.num_held_bytes} bytes of other files" if blocks.num_held_bytes else ""


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"a row is {type(row).__name__}")
    return row


def _keys(rows: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    return tuple(dict.fromkeys(key for row in rows for key in row))
