"""Images as files and as pixels: engine and trainer decode with the same code, so that both see the same pixels."""

import io
import struct
import warnings
import zlib

from PIL import Image

from penstock.errors import InvalidRequestError

MAX_PIXELS = 100_000_000
"""Larger images are refused before they are decoded."""


def decode_image(data: bytes, *, field: str = "image") -> Image.Image:
    """Decode an image file to RGB; palettes are looked up, transparency is dropped, orientation tags are not followed.

    Args:
        data: The file: PNG, JPEG, WebP or GIF (first frame).
        field: What to call it in an error.

    Raises:
        InvalidRequestError: the bytes are no image, are cut short, or hold too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequestError(
                f"{field} has {image.width} x {image.height} pixels; at most {MAX_PIXELS} are taken"
            )
        if image.mode in ("P", "PA") and "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, OverflowError, struct.error, zlib.error) as error:
        reason = str(error).partition(" <_io")[0]  # Pillow names the buffer's address
        raise InvalidRequestError(
            f"{field} ({len(data)} bytes) cannot be decoded: {reason}; send a complete PNG, JPEG, WebP or GIF file"
        ) from None
    except Image.DecompressionBombError as error:
        raise InvalidRequestError(f"{field}: {error}") from None
