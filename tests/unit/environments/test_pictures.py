"""Pictures of other people's code become files without a change."""

import base64
import io

import pytest
from PIL import Image

from penstock.environments.pictures import read_picture
from penstock.errors import EnvironmentFailedError
from tests.support.worker.scripted_episodes import picture

PNG, JPEG = picture(4, 3), picture(4, 3, form="JPEG")
URL = f"data:image/jpeg;base64,{base64.b64encode(JPEG).decode()}"


@pytest.mark.parametrize(
    "value",
    [
        JPEG,
        bytearray(JPEG),
        memoryview(JPEG),
        URL,
        URL.replace("image/jpeg", "image/None"),
        URL.replace("data:image/jpeg", "DATA:"),
        {"url": URL},
        {"url": URL, "detail": "high"},
        {"bytes": JPEG, "path": None},
    ],
)
def test_a_file_s_bytes_pass_as_they_are(value: object) -> None:
    """Whatever they are kept in; nothing is encoded again."""
    assert read_picture(value, "x") == JPEG


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_an_image_becomes_a_png_of_its_pixels(mode: str) -> None:
    """In its own mode, so that not a bit is lost."""
    image = Image.radial_gradient("L").resize((7, 5)).convert(mode)
    read = Image.open(io.BytesIO(read_picture(image, "x")))
    assert (read.format, read.mode, read.size, read.tobytes()) == ("PNG", mode, (7, 5), image.tobytes())


@pytest.mark.parametrize("mode", ["CMYK", "F", "YCbCr"])
def test_an_image_of_a_mode_that_no_png_has_becomes_rgb(mode: str) -> None:
    """As Pillow converts it."""
    image = Image.radial_gradient("L").resize((7, 5)).convert(mode)
    read = Image.open(io.BytesIO(read_picture(image, "x")))
    assert (read.mode, read.tobytes()) == ("RGB", image.convert("RGB").tobytes())


def test_an_image_is_shown_as_its_maker_saw_it() -> None:
    """A camera's note on how to turn it is left out, because a reader might obey it a second time."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (7, 5)).save(file, "JPEG", exif=exif)
    read = Image.open(io.BytesIO(read_picture(Image.open(file), "x")))
    assert (read.size, dict(read.getexif())) == ((7, 5), {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("https://example.org/a.png", "x = 'https://example.org/a.png', which is never opened or fetched; give a PIL"),
        ("/etc/passwd", "x = '/etc/passwd', which is never opened"),
        ("data:image/png,abc", "never opened or fetched"),
        ("data:image/png;base64,a", "is not base64"),
        ("data:image/png;base64,", "x holds no bytes"),
        (b"", "x holds no bytes"),
        (None, "x is a NoneType; give a PIL image"),
        ([[0, 255]], "x is a list; give"),
        ({"src": URL}, r"x is a dict with \['src'\]; give"),
        ({"bytes": None, "path": "a.png"}, r"x is a dict with \['bytes', 'path'\]; give"),
    ],
)
def test_what_is_no_picture_is_refused(value: object, reason: str) -> None:
    """With the place, the value and what to give instead; no file is opened and nothing is fetched."""
    with pytest.raises(EnvironmentFailedError, match=reason):
        read_picture(value, "x")
