"""What the policy sees of an image file."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.model.images import decode_image, image_format


@pytest.mark.parametrize("options", [{}, {"transparency": 40_000}], ids=["plain", "transparent"])
def test_greys_of_16_bits_keep_their_order(options: dict[str, int]) -> None:
    """With their high byte, as colours of 16 bits do: 65535 is white and 257 is not."""
    greys = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    file = io.BytesIO()
    Image.fromarray(greys).save(file, "PNG", **options)
    decoded = np.asarray(decode_image(file.getvalue()))
    assert (decoded == (greys >> 8)[..., None]).all()


@pytest.mark.parametrize(
    ("written_as", "options", "expected"),
    [("PNG", {}, "png"), ("JPEG", {}, "jpeg"), ("WEBP", {}, "webp"), ("GIF", {}, "gif"),
     ("MPO", {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}, "jpeg")],
)  # fmt: skip
def test_a_format_is_named_as_in_media_types(written_as: str, options: dict[str, Any], expected: str) -> None:
    """Phones put several pictures into one JPEG, which Pillow calls MPO."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, written_as, **options)
    assert image_format(file.getvalue()) == expected
