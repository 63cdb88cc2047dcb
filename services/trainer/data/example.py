"""Rows of a data set to examples, the part of a prompt that comes from the data.

Invariant: the images that an example's messages refer to are exactly the images beside them, in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.model.images import decode_image
from penstock.records import Message
from services.trainer.data.columns import Columns, cell
from services.trainer.data.config import DataConfig
from services.trainer.data.golds import read_golds
from services.trainer.data.images import ImageReader
from services.trainer.data.messages import make_messages, place_images, read_turns

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What a prompt takes from a data set."""

    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    golds: tuple[str, ...]
    images_put_first: bool = False
    """Whether the row's text had no `<image>`, and the images were put before it."""


def make_example(row: Mapping[str, Any], columns: Columns, config: DataConfig, reader: ImageReader) -> Example:
    """Turn a row into an example.

    Args:
        row: Values by column.
        columns: Which of them to read.
        config: How to read them.
        reader: Reads the images.

    Raises:
        ValueError: a value is not what its column should hold.
        InvalidRequestError: an image cannot be decoded, or is too large.
    """
    turns = _read(read_turns, row, columns.text)
    golds = _read(read_golds, row, columns.gold)
    placed, cells = place_images(
        turns,
        [image for column in columns.images for image in _images(cell(row, column))],
        images_first=config.images_first,
    )
    images = tuple(reader.read(image) for image in cells)
    for number, data in enumerate(images):
        decode_image(data, field=f"image {number}")  # completely, as the engine will, so that truncated files are found
    return Example(
        messages=make_messages(placed, prompt_suffix=config.prompt_suffix, system_prompt=config.system_prompt),
        images=images,
        golds=golds,
        images_put_first=placed != turns,
    )


def _read(read: Callable[[Any], T], row: Mapping[str, Any], column: str) -> T:
    try:
        return read(cell(row, column))
    except ValueError as error:
        raise ValueError(f"column {column!r} holds {error}") from None


def _images(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
