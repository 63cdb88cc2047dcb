"""Pictures of other people's code become files without a change."""

import base64
import io

import pytest
from PIL import Image, UnidentifiedImageError

from penstock.environments.adapters.answers import open_images
from penstock.environments.pictures import read_picture
from penstock.errors import EnvironmentFailedError
from penstock.model.images import decode_image
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


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr"])
def test_an_image_of_a_mode_that_no_png_has_becomes_rgb(mode: str) -> None:
    """As Pillow converts it."""
    image = Image.radial_gradient("L").resize((7, 5)).convert(mode)
    read = Image.open(io.BytesIO(read_picture(image, "x")))
    assert (read.mode, read.tobytes()) == ("RGB", image.convert("RGB").tobytes())


@pytest.mark.parametrize(
    ("mode", "values", "written"),
    [
        ("I", [0, 1, 255], "L"),
        ("F", [0, 1, 255], "L"),
        ("F", [0], "L"),
        ("I", [0, 257, 65_535], "I;16"),
        ("I;16B", [0, 257, 65_535], "I;16"),
    ],
)
def test_an_image_of_numbers_is_written_with_the_bits_that_they_need(
    mode: str, values: list[int], written: str
) -> None:
    """Of 8 bits, or else of 16; the policy sees black as black, white as white, and what is between."""
    image = Image.new(mode, (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    data = read_picture(image, "x")
    read = Image.open(io.BytesIO(data))
    assert (read.mode, [read.getpixel((x, 0)) for x in range(len(values))]) == (written, values)
    seen = [decode_image(data).getpixel((x, 0)) for x in range(len(values))]
    assert seen == [(value if written == "L" else value // 257,) * 3 for value in values]


@pytest.mark.parametrize(
    ("mode", "values"), [("I", [-1, 5]), ("I", [0, 65_536]), ("F", [0, 1]), ("F", [0, 256]), ("F", [-1, 5])]
)
def test_an_image_of_numbers_that_no_picture_has_is_refused(mode: str, values: list[int]) -> None:
    """Clipped, or all black, it would show what nobody drew."""
    image = Image.new(mode, (2, 1))
    image.putdata(values)
    with pytest.raises(EnvironmentFailedError, match=rf"x is a PIL image of mode {mode} with values from .* to 0 to 2"):
        read_picture(image, "x")


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


def test_environments_get_images_of_the_usual_formats_only() -> None:
    """Pillow's other readers are never used on bytes from outside."""
    assert [(image.format, image.size) for image in open_images((PNG, JPEG))] == [("PNG", (4, 3)), ("JPEG", (4, 3))]
    with pytest.raises(UnidentifiedImageError):
        open_images((picture(4, 3, form="TIFF"),))
