"""What the engine's request checker computes and decodes; that it refuses is tested with the engine itself."""

import io
import itertools
from pathlib import Path

import pytest
from PIL import Image

from penstock.errors import InvalidRequestError
from penstock.model.images import decode_image
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.engine.prompt import ImageGrid, PromptChecker

SIDES = [1, 16, 31, 48, 49, 95, 96, 97, 130, 144, 150, 223, 224, 225, 500, 1333, 1600]


def _file(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)  # type: ignore[arg-type]
    return file.getvalue()


def test_image_tokens_are_those_of_the_image_processor(tiny_model_path: Path) -> None:
    """For sides from 1 to 1600 pixels, wherever the processor takes them."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(tiny_model_path)
    grid = ImageGrid.of(tiny_model_path)
    for width, height in itertools.product(SIDES, SIDES):
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(InvalidRequestError, match="200 times"):
                grid.num_tokens(width, height, field="image")
            continue
        expected = processor.get_number_of_image_patches(height, width, {}) // 4
        assert grid.num_tokens(width, height, field="image") == expected, (width, height)


def test_response_is_cut_to_what_the_context_leaves(tiny_model_path: Path) -> None:
    """A 96 x 96 image has 9 tokens: 2 + 9 of prompt leave 89 of 100."""
    checker = PromptChecker(tiny_model_path, max_tokens=100)
    turn = checker.check(
        generate_pb2.GenerateRequest(
            input_ids=[363, 366, 1],
            images=[common_pb2.Image(data=_file(Image.new("RGB", (96, 96))))],
            sampling=generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=500, stop_token_ids=[7]),
        )
    )
    assert turn.max_new_tokens == 89
    assert turn.stop_token_ids == [7, 354, 356]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK"])
def test_every_mode_decodes_to_rgb(mode: str) -> None:
    """Pixels are Pillow's own conversion to RGB."""
    image = Image.new("RGB", (5, 4), (200, 100, 50)).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = image.convert("I;16")
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    decoded = decode_image(file.getvalue())
    assert (decoded.mode, decoded.size) == ("RGB", (5, 4))
    if mode in ("RGB", "RGBA"):
        assert decoded.getpixel((0, 0)) == (200, 100, 50)


def test_transparent_palettes_keep_their_colours() -> None:
    """Transparency is dropped, not blended."""
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    assert decode_image(_file(image, transparency=bytes([0, 0]))).getpixel((0, 0)) == (10, 200, 30)


@pytest.mark.parametrize("cut", [0, 1, 8, 30, 60, -12, -1])
def test_cut_files_are_refused(cut: int) -> None:
    """Wherever the file ends too early before its pixels are complete, the error names the field."""
    image = Image.effect_noise((64, 64), 80).convert("RGB")
    data = _file(image)[:cut]
    if cut == -1 or cut == -12:  # only the end mark is missing: all pixels are there
        assert decode_image(data).size == (64, 64)
        return
    with pytest.raises(InvalidRequestError, match=r"images\[3\] \(\d+ bytes\) cannot be decoded"):
        decode_image(data, field="images[3]")


def test_bombs_are_refused() -> None:
    """A small file that would unpack to gigabytes is refused before it does."""
    with pytest.raises(InvalidRequestError, match="pixels"):
        decode_image(_file(Image.new("1", (20_000, 20_000))))
