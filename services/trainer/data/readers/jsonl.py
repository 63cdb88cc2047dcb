"""JSON Lines, and JSON files that hold a list of objects."""

import gzip
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import DataError
from services.trainer.data.table import NUM_SHOWN_ROWS


class LinesTable:
    """A file with one JSON object a line. Memory holds the places of the lines, and no row."""

    def __init__(self, file: Path) -> None:
        """Find the lines; empty ones are no rows.

        Raises:
            DataError: the file cannot be read.
        """
        self._file = file
        self._starts = array("q")
        self._lengths = array("q")
        try:
            with file.open("rb") as opened:
                self._index(opened)
        except OSError as error:
            raise DataError(f"data.path {str(file)!r} cannot be read: {error.strerror}") from None
        self.columns = _keys(self._shown_rows())

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        try:
            with self._file.open("rb") as opened:
                opened.seek(self._starts[number])
                line = opened.read(self._lengths[number])
            return _object(json.loads(line))
        except OSError as error:
            raise DataError(f"data.path {str(self._file)!r} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"data.path {str(self._file)!r}, row {number}: it is not a JSON object: {error}; repair the line"
            ) from None

    def _shown_rows(self) -> Iterator[Mapping[str, Any]]:
        for number in range(min(len(self), NUM_SHOWN_ROWS)):
            with suppress(DataError):  # the row is refused or dropped when it is played
                yield self[number]

    def _index(self, opened: BinaryIO) -> None:
        place = 0
        for line in opened:
            if line.strip():
                self._starts.append(place)
                self._lengths.append(len(line))
            place += len(line)


class ListTable:
    """A file that is one JSON list of objects, which is held in memory."""

    def __init__(self, file: Path, rows: Any) -> None:
        """Hold the rows of a file.

        Raises:
            DataError: they are no list of objects.
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


def open_json(file: Path, *, max_bytes: int) -> LinesTable | ListTable:
    """Open a `.json` file: a list if it begins as one, else lines.

    Raises:
        DataError: as the two tables do.
    """
    try:
        with file.open("rb") as opened:
            is_list = opened.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except OSError as error:
        raise DataError(f"data.path {str(file)!r} cannot be read: {error.strerror}") from None
    if not is_list:
        return LinesTable(file)
    require_size(file, max_bytes)
    try:
        return ListTable(file, json.loads(file.read_bytes()))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"data.path {str(file)!r} is not a JSON list of objects: {error}") from None


def open_zipped_json(file: Path, *, max_bytes: int) -> ListTable:
    """Open a `.json.gz` or `.jsonl.gz` file: a list if it begins as one, else lines. It is held in memory.

    Raises:
        DataError: it is no gzip file, too large when unzipped, or holds no objects.
    """
    try:
        with gzip.open(file) as opened:
            content = opened.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.path {str(file)!r} cannot be unzipped: {error}") from None
    if len(content) > max_bytes:
        raise DataError(
            f"data.path {str(file)!r} has more than {max_bytes} bytes when unzipped, and is read as a whole; unzip it "
            "to .jsonl, which is read row by row, or raise data.memory_gib"
        )
    text = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    try:
        is_list = text.startswith(b"[")
        rows = json.loads(text) if is_list else [json.loads(line) for line in text.split(b"\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"data.path {str(file)!r} is not JSON: {error}") from None
    return ListTable(file, rows)


def require_size(file: Path, max_bytes: int) -> None:
    """Refuse a file that has to be read as a whole and is larger than that.

    Raises:
        DataError: it is too large.
    """
    if file.stat().st_size > max_bytes:
        raise DataError(
            f"data.path {str(file)!r} has {file.stat().st_size} bytes and must be read as a whole; convert it to "
            ".jsonl or .parquet, which are read row by row, or raise data.memory_gib"
        )


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"a row is {type(row).__name__}")
    return row


def _keys(rows: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    return tuple(dict.fromkeys(key for row in rows for key in row))
