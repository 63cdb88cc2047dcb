"""Reads images, in the forms found in data sets, as encoded files.

    bytes   {"bytes": ..., "path": ...}   base64   data:image/png;base64,...   a path below the data file's folder
    {"image": ..., "max_pixels": ...}   {"url": ...}   {"type": "image_url", "image_url": {"url": ...}}

Invariant: a row's path reaches no file outside its folder, and its address is downloaded only if the settings allow it.
"""

import base64
import binascii
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.trainer.data.rows.resizing import fit_pixels
from services.trainer.data.sources.downloads import MAX_FILE_BYTES, download

_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")
_KEYS = ("image", "image_url", "url")
"""Keys of structs that hold an image in another form."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
_MAX_PATH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """Reads the image in a cell."""

    folder: Path
    """Folder that paths are relative to and may not leave."""
    downloads: Path | None = None
    """Folder for downloaded images; None allows no download."""
    min_pixels: int = 0
    """Smaller images are enlarged to this number of pixels, unless the cell has its own; 0: no bound."""
    max_pixels: int = 0
    """Larger images are shrunk to this number of pixels, unless the cell has its own; 0: no bound."""

    def read(self, cell: Any) -> bytes:
        """Return the encoded file.

        Raises:
            ValueError: the cell holds no image, or one that cannot be read.
            InvalidRequestError: an image that must be resized cannot be decoded, or is too large.
        """
        return fit_pixels(
            self._encoded(cell),
            min_pixels=_bound(cell, "min_pixels") or self.min_pixels,
            max_pixels=_bound(cell, "max_pixels") or self.max_pixels,
        )

    def _encoded(self, cell: Any) -> bytes:
        match cell:
            case {"bytes": bytes(data)} | bytes(data):
                return data
            case {"path": str(path)} if path:
                return self._file(path)
            case str(text) if text:
                return self._text(text)
            case Mapping():
                for key in _KEYS:
                    if cell.get(key) is not None:
                        return self._encoded(cell[key])
        raise ValueError(
            f"an image is {'nothing' if cell is None else type(cell).__name__}; want bytes, a struct of bytes and path,"
            " base64, a data URI, or the path of a file"
        )

    def _text(self, text: str) -> bytes:
        if text.startswith("data:"):
            return _decoded(text.partition(",")[2])
        if text.startswith(("http://", "https://")):
            if self.downloads is None:
                raise ValueError(f"an image is at {text[:200]!r}; allow downloads with --data.image_urls=true")
            return download(text, self.downloads)
        if len(text) < _MAX_PATH and (Path(text).suffix or self._is_file(text)):
            return self._file(text)
        return _decoded(text)

    def _is_file(self, path: str) -> bool:
        try:
            return self._inside(path).is_file()
        except (OSError, ValueError):
            return False

    def _file(self, path: str) -> bytes:
        file = self._inside(path)
        try:
            with open(file, "rb", opener=_without_waiting) as opened:
                status = os.fstat(opened.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
                    raise ValueError(f"image file {path!r} is no file of at most {MAX_FILE_BYTES} bytes")
                return opened.read()
        except OSError as error:
            raise ValueError(f"image file {path!r} cannot be read in {self.folder}: {error.strerror}") from None

    def _inside(self, path: str) -> Path:
        """Return the path below `folder`. Links in it are followed: the folder's owner made them, not the row."""
        folder = os.path.abspath(self.folder)
        file = os.path.abspath(os.path.join(folder, path))
        if os.path.commonpath([folder, file]) != folder:
            raise ValueError(f"image file {path!r} is outside {folder}; put the images beside the data")
        return Path(file)


def has_image(cell: Any, *, or_its_name: bool = False) -> bool:
    """Return whether a cell holds an image or a list of images, as bytes or data URIs.

    Args:
        cell: The cell.
        or_its_name: Whether the path or the address of an image file counts too.
    """
    match cell:
        case bytes(data) | {"bytes": bytes(data)}:
            return data.startswith(_MAGIC)
        case {"path": str(path)} if path:
            return or_its_name and names_image(path)
        case str(text):
            return text.startswith("data:image/") or (or_its_name and names_image(text))
        case [*cells]:
            return has_image(next((each for each in cells if each is not None), None), or_its_name=or_its_name)
        case Mapping():
            return any(has_image(cell.get(key), or_its_name=or_its_name) for key in _KEYS)
    return False


def names_image(text: str) -> bool:
    """Return whether a text is the path or the address of a file with an image's suffix."""
    if len(text) >= _MAX_PATH or "\n" in text:
        return False
    if text.startswith(("http://", "https://")):
        try:
            text = urlsplit(text).path
        except ValueError:  # a text that only begins like an address
            return False
    return text.lower().endswith(_SUFFIXES)


def _bound(cell: Any, key: str) -> int:
    """Return a cell's own bound on its pixels; 0 if it has none."""
    value = cell.get(key) if isinstance(cell, Mapping) else None
    if value is None:
        return 0
    if not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ValueError(f"an image's {key} is {str(value)[:80]}; want a number of pixels")
    return int(value)


def _without_waiting(file: str, flags: int) -> int:
    """Open a file without blocking; a pipe would otherwise wait for its writer."""
    return os.open(file, flags | os.O_NONBLOCK)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image is text that is not base64, and no path of a file: {error}") from None
