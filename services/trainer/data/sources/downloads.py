"""Downloads each image that a data set names by address once.

Invariant: each try of a download ends within `DEADLINE_S`, reads at most `MAX_FILE_BYTES`, and follows no redirect
away from http.
"""

import hashlib
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Final

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from penstock.errors import InvalidRequestError, SetupError, TooManyPixelsError
from penstock.model.images import image_format
from penstock.runtime.files import write_atomically

MAX_FILE_BYTES: Final = 64 * 2**20
"""Most bytes of one image file."""
DEADLINE_S: Final = 10.0
"""Longest duration of one download, in seconds."""

_PIECE_BYTES = 2**16
_MAX_TRIES = 4
_FIRST_WAIT_S = 1.0
_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


def download(url: str, folder: Path) -> bytes:
    """Return the file at an address, from `folder` if it was downloaded before.

    Args:
        url: An http or https address.
        folder: Folder of the files, named by hash of their address; created if missing.

    Raises:
        ValueError: there is no image file of at most `MAX_FILE_BYTES`, or it did not arrive within `DEADLINE_S`
            at any of several tries.
        SetupError: files in `folder` cannot be read or written.
    """
    kept = folder / hashlib.sha256(url.encode()).hexdigest()
    try:
        data = kept.read_bytes()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise _unusable(folder, error) from None
    if _is_image(data):
        return data
    try:
        data = _get_patiently(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"the image at {url[:200]!r} cannot be downloaded: {error}") from None
    if not _is_image(data):  # a page that says sorry would be kept, and never asked for again
        raise ValueError(f"what came from {url[:200]!r}, {len(data)} bytes, is no PNG, JPEG, WebP or GIF file")
    try:
        write_atomically(kept, data)
    except OSError as error:
        raise _unusable(folder, error) from None
    return data


def _is_image(data: bytes) -> bool:
    """Return whether it is an image file, too large a one included, which is refused where it is read."""
    try:
        image_format(data)
    except TooManyPixelsError:
        return True
    except InvalidRequestError:
        return False
    return True


def _unusable(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"downloaded images cannot be kept in {folder}: {error.strerror}; make room, or give another data.cache_dir"
    )


def _get_patiently(url: str) -> bytes:
    """Read an address, again if a server was busy or a connection broke: otherwise the row would count as wrong."""
    retrying = Retrying(
        stop=stop_after_attempt(_MAX_TRIES),
        wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=DEADLINE_S),
        retry=retry_if_exception(_may_pass),
        reraise=True,
    )
    return retrying(_get, url)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _PASSING_STATUSES
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, socket.gaierror):
        return reason.errno == socket.EAI_AGAIN  # and not that there is no such host
    if isinstance(reason, ssl.SSLCertVerificationError | http.client.InvalidURL):
        return False
    return isinstance(reason, OSError | http.client.HTTPException | _BrokenOffError)


class _BrokenOffError(ValueError):
    """A download that did not come whole, or not in time."""


def _get(url: str) -> bytes:
    """Read an address in its own thread: a server that sends one byte at a time never triggers a socket timeout."""
    done: Future[bytes] = Future()

    def read() -> None:
        try:
            done.set_result(_read(url))
        except urllib.error.HTTPError as error:
            error.close()
            done.set_exception(error)
        except Exception as error:  # noqa: BLE001 - it is raised again below
            done.set_exception(error)

    threading.Thread(target=read, name="download", daemon=True).start()
    try:
        return done.result(DEADLINE_S)
    except TimeoutError:
        raise _BrokenOffError(f"it did not come in {DEADLINE_S:g} s") from None


def _read(url: str) -> bytes:
    ends = monotonic() + DEADLINE_S
    request = urllib.request.Request(url, headers={"User-Agent": "penstock"})
    data = bytearray()
    with _OPENER.open(request, timeout=DEADLINE_S) as response:
        while piece := response.read1(_PIECE_BYTES):
            data += piece
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            if monotonic() > ends:
                raise _BrokenOffError(f"{len(data)} bytes came in {DEADLINE_S:g} s")
        if response.length:
            raise _BrokenOffError(f"the connection ended after {len(data)} bytes, {response.length} before the end")
    return bytes(data)


def _http_only() -> urllib.request.OpenerDirector:
    """Return an opener for http and https only, also for redirects."""
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
