"""Decodes images: engine and trainer use the same code, so that both see the same pixels."""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from PIL import Image

from penstock.errors import InvalidRequestError, TooManyPixelsError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""The only formats that are opened: Pillow's other readers are never used, whatever the bytes claim to be."""

MAX_PIXELS: Final = 100_000_000
"""The most pixels in all images of a request together, checked before any is decoded: 300 MB in memory."""

_HIGH_BYTES: Final = [value >> 8 for value in range(2**16)]
"""The 8 bits that a channel of 16 keeps, as where Pillow reads colours of 16 bits."""

_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, IndexError, OverflowError, struct.error, zlib.error)
"""Errors that Pillow's readers raise for truncated or damaged files."""


def read_sizes(images: Sequence[bytes], *, field: str = "images") -> list[tuple[int, int]]:
    """Return the width and height of each encoded image, read from its header.

    Args:
        images: The files: PNG, JPEG, WebP or GIF.
        field: The field to name in an error.

    Raises:
        InvalidRequestError: one is not such a file.
        TooManyPixelsError: together they have more than `MAX_PIXELS` pixels.
    """
    sizes: list[tuple[int, int]] = []
    for index, data in enumerate(images):
        with _reported(data, f"{field}[{index}]"):
            sizes.append(_open(data).size)
    _check_pixels(sizes, field)
    return sizes


def image_format(data: bytes) -> str:
    """Return the format of an encoded image, in lower case as in media types: png, jpeg, webp or gif.

    Raises:
        InvalidRequestError: it is not such a file.
    """
    with _reported(data, "image"):
        name = str(_open(data).format).lower()
    return "jpeg" if name == "mpo" else name  # Pillow's name for a JPEG with further pictures in it, as phones write


def decode_image(data: bytes, *, field: str = "image") -> Image.Image:
    """Decode an image file to 8-bit RGB; palettes are resolved, transparency is dropped, orientation tags are ignored.

    Args:
        data: The file: PNG, JPEG, WebP or GIF (first frame).
        field: The field to name in an error.

    Raises:
        InvalidRequestError: the bytes are not such a file, or are truncated.
        TooManyPixelsError: it has more than `MAX_PIXELS` pixels.
    """
    with _reported(data, field):
        image: Image.Image = _open(data)
        _check_pixels([image.size], field)
        if image.mode in ("P", "PA") and "transparency" in image.info:
            image = image.convert("RGBA")
        if image.mode.startswith("I"):  # greys of 16 bits: `convert` shows all above 255 white
            image = image.convert("I").point(_HIGH_BYTES, "L")
        return image.convert("RGB")


def _open(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is stricter
        return Image.open(io.BytesIO(data), formats=FORMATS)


def _check_pixels(sizes: Sequence[tuple[int, int]], field: str) -> None:
    num_pixels = sum(width * height for width, height in sizes)
    if num_pixels > MAX_PIXELS:
        shown = ", ".join(f"{width} x {height}" for width, height in sizes[:4]) + (", ..." if len(sizes) > 4 else "")
        raise TooManyPixelsError(
            f"{field}: {num_pixels} pixels ({shown}); a request may have {MAX_PIXELS} in all; send smaller images"
        )


@contextmanager
def _reported(data: bytes, field: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        reason = str(error).partition(" <_io")[0]  # Pillow names the buffer's address
        raise InvalidRequestError(
            f"{field} ({len(data)} bytes) cannot be decoded: {reason}; send a complete PNG, JPEG, WebP or GIF file"
        ) from None
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"{field}: {error}; send smaller images") from None
