"""Images that a data set names by address, downloaded once.

Invariant: a download ends within `DEADLINE_S`, reads at most `MAX_FILE_BYTES`, and follows no redirect away from http.
"""

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from time import monotonic
from typing import Final

MAX_FILE_BYTES: Final = 64 * 2**20
"""Most bytes of one image file."""
DEADLINE_S: Final = 10.0
"""The longest that one download may take."""

_PIECE_BYTES = 2**16


def download(url: str, folder: Path) -> bytes:
    """Return what is at an address, from `folder` if it was downloaded before.

    Args:
        url: An http or https address.
        folder: Holds the files, by hash of their address; created if it is missing.

    Raises:
        ValueError: there is no file of at most `MAX_FILE_BYTES`, or it did not come within `DEADLINE_S`.
    """
    kept = folder / hashlib.sha256(url.encode()).hexdigest()
    try:
        return kept.read_bytes()
    except FileNotFoundError:
        pass
    try:
        data = _get(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise ValueError(f"the image at {url[:200]!r} cannot be downloaded: {error}") from None
    write_atomically(kept, data)
    return data


def write_atomically(file: Path, data: bytes) -> None:
    """Write a file that other processes see whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as opened:
        opened.write(data)
    os.replace(opened.name, file)


def _get(url: str) -> bytes:
    ends = monotonic() + DEADLINE_S
    request = urllib.request.Request(url, headers={"User-Agent": "penstock"})
    data = bytearray()
    with _OPENER.open(request, timeout=DEADLINE_S) as response:
        while piece := response.read1(_PIECE_BYTES):
            data += piece
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            if monotonic() > ends:
                raise ValueError(f"{len(data)} bytes came in {DEADLINE_S:g} s")
    return bytes(data)


def _http_only() -> urllib.request.OpenerDirector:
    """An opener that knows no other scheme, also where an address redirects to one."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


_OPENER = _http_only()
