"""Reads the pictures that other people's code returns, in any of the usual forms.

Invariant: bytes pass through unchanged; an image object becomes a PNG of exactly its pixels, where PNG has its mode.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

from penstock.errors import EnvironmentFailedError

_PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})
_OTHER_BYTE_ORDERS = frozenset({"I;16B", "I;16L", "I;16N"})
_FORMS = "give a PIL image, the bytes of a PNG, JPEG, WebP or GIF file, or its data: URL"


def read_picture(value: object, where: str) -> bytes:
    """Return the encoded file of a picture.

    Args:
        value: A PIL image, the bytes of a file, a data: URL, or a mapping with one of them under "url" or "bytes".
        where: What to call it in an error.

    Raises:
        EnvironmentFailedError: it is none of these, or holds nothing.
    """
    match value:
        case {"url": inner} | {"bytes": inner} if inner is not None:
            return read_picture(inner, where)
        case bytes() | bytearray() | memoryview():
            data = bytes(value)
        case str():
            data = _read_url(value, where)
        case _ if callable(getattr(value, "save", None)) and hasattr(value, "mode"):
            data = _write_png(value, where)
        case _:
            keys = f" with {sorted(map(str, value))}" if isinstance(value, Mapping) else ""
            raise EnvironmentFailedError(f"{where} is a {type(value).__name__}{keys}; {_FORMS}")
    if not data:
        raise EnvironmentFailedError(f"{where} holds no bytes; {_FORMS}")
    return data


def _read_url(url: str, where: str) -> bytes:
    head, comma, text = url.partition(",")
    if head[:5].lower() != "data:" or not comma or not head.lower().endswith(";base64"):
        raise EnvironmentFailedError(f"{where} = {url[:40]!r}, which is never opened or fetched; {_FORMS}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EnvironmentFailedError(f"{where} = {url[:40]!r}... is not base64: {error}; {_FORMS}") from None


def _write_png(image: Any, where: str) -> bytes:
    """Return a PNG without EXIF data, by which a reader would rotate the picture that its maker saw unrotated."""
    file = io.BytesIO()
    if image.mode in _OTHER_BYTE_ORDERS:
        image = image.convert("I").convert("I;16")
    plain = image if image.mode in _PNG_MODES else image.convert(_find_mode(image, where))
    plain.save(file, "PNG", exif=b"")
    return file.getvalue()


def _find_mode(image: Any, where: str) -> str:
    """Return a mode of PNG for an image of another mode. Modes of integers and floats do not say what is white; the
    values do.

    Raises:
        EnvironmentFailedError: they would be clipped, or all be black.
    """
    if image.mode not in ("I", "F"):
        return "RGB"
    low, high = image.getextrema()
    is_fraction = image.mode == "F" and 0 < high <= 1
    if 0 <= low <= high <= 255 and not is_fraction:
        return "L"
    if image.mode == "I" and 0 <= low <= high < 2**16:
        return "I;16"
    raise EnvironmentFailedError(
        f"{where} is a PIL image of mode {image.mode} with values from {low} to {high}; scale them to 0 to 255"
    )
