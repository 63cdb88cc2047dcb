"""Images in the forms that data sets have them in, and what a row may not reach."""

import base64
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequestError, SetupError
from penstock.model import images
from penstock.model.images import decode_image, read_sizes
from penstock.runtime.files import write_atomically
from services.trainer.data.rows.images import ImageReader
from services.trainer.data.rows.resizing import fit_pixels
from services.trainer.data.sources import downloads
from tests.support.trainer.data.pictures import jpeg, png

PNG = png("blue")


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits until a server is better; see test_downloads.py."""
    monkeypatch.setattr(downloads, "_MAX_TRIES", 1)


BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "cell",
    [
        PNG,
        {"bytes": PNG, "path": "gone.png"},
        {"bytes": None, "path": "p.png"},
        {"image": {"bytes": PNG}},
        {"image": "p.png", "min_pixels": None},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"url": f"data:image/None;base64,{BASE64}"},
        BASE64,
        "p.png",
        "./deeper/../p.png",
        "no_suffix",
    ],
)
def test_every_form_gives_the_same_file(tmp_path: Path, cell: Any) -> None:
    """Bytes, struct, base64, data URI, a part of a message, and paths beside the data."""
    for name in ("p.png", "no_suffix"):
        (tmp_path / name).write_bytes(PNG)
    assert ImageReader(folder=tmp_path).read(cell) == PNG


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("../secret.png", "outside .*put the images beside the data"),
        ("/etc/passwd.png", "outside"),
        ({"path": "a/../../secret.png"}, "outside"),
        ("missing.png", "cannot be read in .*No such file"),
        ("pipe.png", "is no file of at most 67108864 bytes"),
        ("folder.png", "is no file|Is a directory"),
        ("large.png", "is no file of at most 67108864 bytes"),
        ("nul\0.png", "embedded null|null"),
        ("neither base64 nor a path", "text that is not base64, and no path of a file"),
        ("http://127.0.0.1/x.png", "allow downloads with --data.image_urls=true"),
        ("file:///etc/passwd", "cannot be read|outside|not base64"),
        (7, "an image is int; want bytes"),
        ({}, "an image is dict; want bytes"),
        ({"bytes": PNG, "max_pixels": [1]}, r"an image's max_pixels is \[1\]; want a number"),
        ({"bytes": PNG, "min_pixels": -5}, "an image's min_pixels is -5; want a number"),
        ("", "an image is str"),
    ],
)
def test_what_is_no_image_of_the_data_is_refused(tmp_path: Path, cell: Any, words: str) -> None:
    """A path that leaves the folder above all, and what would block or fill the memory."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    os.mkfifo(data / "pipe.png")
    (data / "folder.png").mkdir()
    with (data / "large.png").open("wb") as file:
        file.truncate(downloads.MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match=words):
        ImageReader(folder=data).read(cell)


def test_links_in_the_folder_are_followed(tmp_path: Path) -> None:
    """The Hugging Face cache is made of them; who owns the folder made them, not the row."""
    (tmp_path / "blob").write_bytes(PNG)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "p.png").symlink_to(tmp_path / "blob")
    assert ImageReader(folder=tmp_path / "data").read("p.png") == PNG


@contextmanager
def web_server(body: bytes, *, redirect: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server with one picture; its address, and what was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302 if redirect else 200)
            if redirect:
                self.send_header("Location", redirect)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_address_is_downloaded_once_if_a_person_allows_it(tmp_path: Path) -> None:
    """Later epochs and later runs read the file."""
    reader = ImageReader(folder=tmp_path, downloads=tmp_path / "cache")
    with web_server(PNG) as (url, asked):
        assert [reader.read({"url": f"{url}/a.png"}) for _ in range(2)] == [PNG, PNG]
        assert asked == ["/a.png"]
    assert reader.read(f"{url}/a.png") == PNG
    with pytest.raises(ValueError, match=r"the image at 'http://127.*b\.png' cannot be downloaded: .*refused"):
        reader.read(f"{url}/b.png")


def test_a_download_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bytes and of time, and it stays with http."""
    reader = ImageReader(folder=tmp_path, downloads=tmp_path / "cache")
    for elsewhere in ("file:///etc/passwd", "ftp://127.0.0.1/x.png"):
        with (
            web_server(PNG, redirect=elsewhere) as (url, _),
            pytest.raises(ValueError, match=r"not allowed|unknown url"),
        ):
            reader.read(url)
    with web_server(PNG) as (url, _):
        monkeypatch.setattr(downloads, "MAX_FILE_BYTES", len(PNG) - 1)
        with pytest.raises(ValueError, match=f"it has more than {len(PNG) - 1} bytes"):
            reader.read(url)
        monkeypatch.setattr(downloads, "MAX_FILE_BYTES", len(PNG))
        monkeypatch.setattr(downloads, "monotonic", iter([0.0, 10.5]).__next__)
        with pytest.raises(ValueError, match=f"{len(PNG)} bytes came in 10 s"):
            reader.read(url)
    assert not (tmp_path / "cache").exists()


def test_a_server_that_trickles_its_headers_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the whole never does."""
    monkeypatch.setattr(downloads, "DEADLINE_S", 0.3)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                while not stop.wait(0.02):
                    connection.sendall(b"H")

        thread = threading.Thread(target=trickle)
        thread.start()
        reader = ImageReader(folder=tmp_path, downloads=tmp_path / "cache")
        try:
            with pytest.raises(ValueError, match=r"cannot be downloaded: it did not come in 0\.3 s"):
                reader.read(f"http://127.0.0.1:{server.getsockname()[1]}/a.png")
        finally:
            stop.set()
            thread.join()


def test_a_cache_that_cannot_be_used_is_a_setting_to_change(tmp_path: Path) -> None:
    """It is no fault of the row, and no traceback."""
    (tmp_path / "cache").write_text("a file")
    reader = ImageReader(folder=tmp_path, downloads=tmp_path / "cache")
    with pytest.raises(SetupError, match=r"cannot be kept in .*cache: Not a directory; .* another data\.cache_dir"):
        reader.read("http://127.0.0.1:9/a.png")


def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a full disk."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "kept", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [
        ((40, 30), {}, (40, 30)),
        ((40, 30), {"max_pixels": 1200, "min_pixels": 1200}, (40, 30)),
        ((400, 300), {"max_pixels": 1200}, (40, 30)),
        ((41, 30), {"max_pixels": 1200}, (40, 29)),
        ((40, 30), {"min_pixels": 120_000}, (400, 300)),
        ((1000, 1), {"max_pixels": 100}, (316, 1)),
    ],
)
def test_pixels_stay_between_bounds(size: tuple[int, int], bounds: dict[str, int], expected: tuple[int, int]) -> None:
    """Sides keep their proportion; a picture that fits keeps its bytes."""
    data = jpeg(size=size)
    fitted = fit_pixels(data, **bounds)
    assert read_sizes([fitted]) == [expected]
    assert (fitted == data) == (size == expected)
    assert decode_image(fitted).getpixel((0, 0)) == decode_image(data).getpixel((0, 0))


def test_a_row_may_have_bounds_of_its_own(tmp_path: Path) -> None:
    """In the struct beside the image, as slime has them; the settings hold for the others."""
    reader = ImageReader(folder=tmp_path, max_pixels=300)
    assert read_sizes([reader.read(PNG), reader.read({"image": PNG, "max_pixels": 75})]) == [(20, 15), (10, 7)]
    with pytest.raises(ValueError, match="min_pixels = 301 is above max_pixels = 300"):
        reader.read({"image": PNG, "min_pixels": 301})


def test_a_bomb_is_not_decoded_to_be_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of pixels holds before any bound."""
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(InvalidRequestError, match=r"1200 pixels \(40 x 30\)"):
        fit_pixels(PNG, max_pixels=100)
