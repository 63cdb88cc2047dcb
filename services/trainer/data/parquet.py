"""Parquet files of problems with images, in the layouts in which Geometry3K is published.

    hiyouga/geometry3k          images list<struct<bytes, path>>, problem, answer
    chenhegu/geo3k_imgurl       images list<string> (base64 data URIs), problem, answer
    CAIR-HKISI/geo3k            images list<binary>, problem, answer as \\boxed{x}
    verl, prepared              prompt list<struct<role, content>>, images, reward_model.ground_truth

Opening a file decodes nothing. Each read returns one row, or an error that names the row and says what is wrong.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from services.trainer.config import DataConfig
from services.trainer.data.example import Row

_PROMPT_COLUMN = "prompt"
_REWARD_COLUMN = "reward_model"


class ParquetRows:
    """The rows of one file."""

    def __init__(self, config: DataConfig) -> None:
        """Open the file and check its columns.

        Raises:
            DataError: the file is not Parquet, has no rows, or lacks a column.
        """
        import pyarrow
        import pyarrow.parquet

        self.path = Path(config.path)
        self._config = config
        try:
            file = pyarrow.parquet.ParquetFile(self.path)
            present = file.schema_arrow.names
            self._text_column = self._choose(present, config.problem_column, _PROMPT_COLUMN, "data.problem_column")
            self._gold_column = self._choose(present, config.answer_column, _REWARD_COLUMN, "data.answer_column")
            columns = [self._text_column, self._gold_column]
            self._has_images = config.images_column in present
            if self._has_images:
                columns.append(config.images_column)
            elif config.images_column != DataConfig.model_fields["images_column"].default:
                raise self._missing(config.images_column, present, "data.images_column")
            self._table = file.read(columns=columns)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"data.path {config.path!r} cannot be read as Parquet: {error}") from None
        if len(self._table) == 0:
            raise DataError(f"data.path {config.path!r} holds no rows")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._table)

    def __getitem__(self, row: int) -> Row:
        """Read one row.

        Raises:
            DataError: a cell has the wrong type.
        """
        cells = self._table.slice(row, 1).to_pylist()[0]
        return Row(
            turns=self._turns(cells[self._text_column], row),
            images=self._images(cells.get(self._config.images_column), row),
            golds=self._golds(cells[self._gold_column], row),
        )

    def _choose(self, present: list[str], wanted: str, instead: str, key: str) -> str:
        if wanted in present:
            return wanted
        if instead in present:
            return instead
        raise self._missing(wanted, present, key)

    def _missing(self, column: str, present: list[str], key: str) -> DataError:
        return DataError(
            f"data.path {str(self.path)!r} has no column {column!r}; it has {', '.join(present)}. "
            f"Name the right one with --{key}=..."
        )

    def _wrong(self, row: int, what: str) -> DataError:
        return DataError(f"data.path {str(self.path)!r}, row {row}: {what}")

    def _turns(self, cell: Any, row: int) -> tuple[tuple[str, str], ...]:
        match cell:
            case str():
                return (("user", cell),)
            case [*messages] if messages and all(_is_message(message) for message in messages):
                return tuple((message["role"], message["content"]) for message in messages)
        raise self._wrong(
            row,
            f"column {self._text_column!r} holds {_kind(cell)}; want text, or messages with role and content as text",
        )

    def _golds(self, cell: Any, row: int) -> tuple[str, ...]:
        value = cell.get("ground_truth") if isinstance(cell, Mapping) else cell
        values = value if isinstance(value, list) else [value]
        golds = tuple(_unboxed(str(gold).strip()) for gold in values if isinstance(gold, str | int | float))
        if not golds or len(golds) < len(values) or "" in golds:
            raise self._wrong(
                row, f"column {self._gold_column!r} holds {_kind(value)}; want the correct answer as text"
            )
        return golds

    def _images(self, cell: Any, row: int) -> tuple[bytes, ...]:
        cells = cell if isinstance(cell, list) else [] if cell is None else [cell]
        return tuple(self._image(image, row) for image in cells)

    def _image(self, cell: Any, row: int) -> bytes:
        match cell:
            case {"bytes": bytes(data)} | bytes(data):
                return data
            case {"path": str(path)} if path:
                try:
                    return (self.path.parent / path).read_bytes()
                except OSError as error:
                    raise self._wrong(row, f"image file {path!r} cannot be read: {error.strerror}") from None
            case str(text):
                encoded = text.partition(",")[2] if text.startswith("data:") else text
                try:
                    return base64.b64decode(encoded, validate=True)
                except binascii.Error as error:
                    raise self._wrong(row, f"an image is text that is not base64: {error}") from None
        raise self._wrong(
            row, f"an image is {_kind(cell)}; want bytes, a struct of bytes and path, or a base64 data URI"
        )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.get("role") in ("system", "user", "assistant")
        and isinstance(value.get("content"), str)
    )


def _unboxed(text: str) -> str:
    r"""`\boxed{x}` -> `x`, if the box surrounds the whole text."""
    if not (text.startswith(r"\boxed{") and text.endswith("}")):
        return text
    inner = text[len(r"\boxed{") : -1]
    depth = 0
    for character in inner:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return text
    return inner.strip() if depth == 0 else text


def _kind(value: Any) -> str:
    return "nothing" if value is None else "empty text" if value == "" else type(value).__name__
