"""Small picture files for data sets."""

import io

from PIL import Image


def png(color: str = "red", mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> bytes:
    """An encoded picture of one colour."""
    out = io.BytesIO()
    Image.new("RGB", size, color).convert(mode).save(out, "PNG")
    return out.getvalue()


def jpeg(color: str = "red", size: tuple[int, int] = (40, 30)) -> bytes:
    """The same as a JPEG."""
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "JPEG")
    return out.getvalue()
