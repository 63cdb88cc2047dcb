"""Pictures that rows name by address: downloaded once, and whole."""

import hashlib
import http.client
import http.server
import socket
import ssl
import threading
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.trainer.data.sources import downloads
from services.trainer.data.sources.downloads import download
from tests.support.trainer.data.pictures import png

WHOLE = png().ljust(1000, b"\0")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt follows without a wait."""
    monkeypatch.setattr(downloads, "_FIRST_WAIT_S", 0.0)


@contextmanager
def server(sent: list[int], whole: bytes = WHOLE, statuses: Sequence[int] = ()) -> Iterator[str]:
    """A server that refuses the first requests with `statuses`. Of each later answer it sends as many bytes as the next
    of `sent` says, and ends the connection."""
    refusals = [*statuses]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refusals:
                self.send_error(refusals.pop(0))
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole[: sent.pop(0)])

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/a.png"
        finally:
            listening.shutdown()
            thread.join()


def test_a_download_that_breaks_off_is_not_kept(tmp_path: Path) -> None:
    """The next start asks again; what came whole is not asked for again."""
    sent = [100, 100, 100, 100, len(WHOLE)]
    with server(sent) as url:
        with pytest.raises(ValueError, match="ended after 100 bytes, 900 before the end"):
            download(url, tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert download(url, tmp_path) == download(url, tmp_path) == WHOLE
    assert sent == []


@pytest.mark.parametrize(("statuses", "sent"), [([503], []), ([429, 500, 502], []), ([], [100]), ([504], [0])])
def test_what_passes_costs_an_attempt(tmp_path: Path, statuses: list[int], sent: list[int]) -> None:
    """A busy server, a connection that breaks: the row is sound, and the run goes on."""
    with server([*sent, len(WHOLE)], statuses=statuses) as url:
        assert download(url, tmp_path) == WHOLE


def test_what_stays_is_asked_for_once(tmp_path: Path) -> None:
    """A file that is not there: a second attempt would get it from this server."""
    with server([len(WHOLE)], statuses=[404]) as url, pytest.raises(ValueError, match=r"cannot be downloaded: .*404"):
        download(url, tmp_path)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "Name or service not known")), False),
        (urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")), True),
        (urllib.error.URLError(ssl.SSLCertVerificationError("certificate has expired")), False),
        (urllib.error.URLError("unknown url type: ftp"), False),
        (http.client.InvalidURL("URL can't contain control characters"), False),
        (http.client.IncompleteRead(b"a"), True),
        (urllib.error.URLError(ConnectionRefusedError()), True),
        (ValueError("it has more than 3 bytes"), False),
    ],
    ids=repr,
)
def test_nobody_waits_for_what_will_not_pass(error: Exception, passes: bool) -> None:
    """A host that is gone costs a data set of dead links no minutes."""
    assert downloads._may_pass(error) == passes


def test_a_page_in_place_of_an_image_is_not_kept(tmp_path: Path) -> None:
    """Such as one that says sorry, or asks to sign in, with 200: the next start asks again."""
    page = b"<html>Too many requests</html>"
    with (
        server([len(page)], page) as url,
        pytest.raises(ValueError, match=r"what came from 'http://127.*a\.png', 30 bytes, is no PNG, JPEG, WebP or GIF"),
    ):
        download(url, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_an_earlier_release_kept_is_replaced(tmp_path: Path) -> None:
    """By the image, when that comes."""
    with server([len(WHOLE)]) as url:
        (tmp_path / hashlib.sha256(url.encode()).hexdigest()).write_bytes(b"<html>Too many requests</html>")
        assert download(url, tmp_path) == WHOLE
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [WHOLE]
