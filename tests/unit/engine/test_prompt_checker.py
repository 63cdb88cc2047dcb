"""What the engine's request checker computes and decodes; that it refuses is tested with the engine itself."""

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.errors import InvalidRequestError, PromptTooLongError
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.images import MAX_PIXELS, decode_image, read_sizes
from penstock.v1 import generate_pb2
from services.rollout.engine.prompt import PromptChecker

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
            sampling=generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=500, stop_token_ids=[7]),
        ),
        [_file(Image.new("RGB", (96, 96)))],
    )
    assert turn.max_new_tokens == 89
    assert turn.stop_token_ids == [7, 354, 356]


def plain_request(**fields: Any) -> generate_pb2.GenerateRequest:
    """A turn of three tokens without images."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 5, **fields.pop("sampling", {})}
    return generate_pb2.GenerateRequest(input_ids=[1, 2, 3], sampling=generate_pb2.SamplingParams(**sampling), **fields)


def test_where_no_token_ends_the_output_not_even_the_models_own_does(tiny_model_path: Path) -> None:
    """SGLang is told of none, and to ignore those it knows."""
    turn = PromptChecker(tiny_model_path, max_tokens=100).check(plain_request(sampling={"ignore_end": True}), ())
    assert (turn.stop_token_ids, turn.ignore_end) == ([], True)


@pytest.mark.parametrize("form", ["json_schema", "regex", "ebnf"])
def test_a_constraint_has_sglangs_name(tiny_model_path: Path, form: str) -> None:
    """Each of the three is one of its sampling parameters."""
    constraint = generate_pb2.Constraint(**{form: "{}"})
    checker = PromptChecker(tiny_model_path, max_tokens=100)
    assert checker.check(plain_request(sampling={"constraint": constraint}), ()).constraint == {form: "{}"}
    assert checker.check(plain_request(), ()).constraint == {}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "many": ({"num_top_logprobs": 21}, "num_top_logprobs = 21 must be from 0 to 20"),
    "negative": ({"num_top_logprobs": -1}, "num_top_logprobs = -1 must be"),
    "ends": ({"sampling": {"ignore_end": True, "stop_token_ids": [5]}}, "both set; leave one out"),
    "no schema": (
        {"sampling": {"constraint": generate_pb2.Constraint(json_schema="[")}},
        r"= '\[' is not a JSON object",
    ),
    "list": ({"sampling": {"constraint": generate_pb2.Constraint(json_schema="[]")}}, "is not a JSON object"),
    "no regex": ({"sampling": {"constraint": generate_pb2.Constraint(regex="")}}, r"constraint\.regex is empty; give"),
    "no grammar": ({"sampling": {"constraint": generate_pb2.Constraint(ebnf="")}}, r"constraint\.ebnf is empty; give"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_reported_or_held_to_is_refused(tiny_model_path: Path, name: str) -> None:
    """With the field, its value and what to do."""
    fields, message = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=message):
        PromptChecker(tiny_model_path, max_tokens=100).check(plain_request(**fields), ())


def test_prompts_with_images_are_not_scored(tiny_model_path: Path) -> None:
    """Their tokens in the engine are not those of the request."""
    made = generate_pb2.GenerateRequest(
        input_ids=[363, 366, 1],
        sampling=generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=5),
        prompt_logprobs=True,
    )
    with pytest.raises(InvalidRequestError, match="prompt_logprobs is set, but there are 1 images"):
        PromptChecker(tiny_model_path, max_tokens=100).check(made, [_file(Image.new("RGB", (96, 96)))])


def test_experts_are_reported_from_a_token_of_the_expanded_prompt_on(tiny_model_path: Path) -> None:
    """A picture of 96 x 96 pixels is 9 tokens: 11 of prompt, and the output's first."""
    checker = PromptChecker(tiny_model_path, max_tokens=100, records_experts=True)
    sampling = generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=5)
    made = generate_pb2.GenerateRequest(input_ids=[363, 366, 1], sampling=sampling)
    files = [_file(Image.new("RGB", (96, 96)))]
    assert checker.check(made, files).routed_experts_from is None
    for first in (0, 11):
        made.routed_experts_from = first
        assert checker.check(made, files).routed_experts_from == first
    for first in (-1, 12):
        made.routed_experts_from = first
        with pytest.raises(InvalidRequestError, match=f"routed_experts_from = {first} must be from 0 to .* 11 tokens"):
            checker.check(made, files)


def test_an_engine_that_records_no_experts_says_what_to_set(tiny_model_path: Path) -> None:
    """A dense model, a peer of a pair, or one that was started without the setting."""
    with pytest.raises(InvalidRequestError, match=r"= 0, but this engine records no experts; .*router_replay = true"):
        PromptChecker(tiny_model_path, max_tokens=100).check(plain_request(routed_experts_from=0), ())


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


def test_the_pixels_of_a_request_have_one_budget_and_none_is_decoded_above_it(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is within the limit and cheap in tokens; together they are not, which their headers show."""
    side = 6_000
    picture = _file(Image.new("1", (side, side)))
    assert read_sizes([picture, picture]) == [(side, side)] * 2
    num_images = MAX_PIXELS // side**2 + 1
    request = generate_pb2.GenerateRequest(
        input_ids=[363, 366] * num_images,
        sampling=generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=5),
    )
    monkeypatch.setattr("services.rollout.engine.prompt.decode_image", lambda *_, **__: pytest.fail("was decoded"))
    with pytest.raises(InvalidRequestError, match=f"images: {num_images * side**2} pixels"):
        PromptChecker(tiny_model_path, max_tokens=100_000).check(request, [picture] * num_images)


def test_a_prompt_that_is_too_long_is_refused_before_its_images_are_decoded(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are counted from the headers; the error has a class of its own."""
    monkeypatch.setattr("services.rollout.engine.prompt.decode_image", lambda *_, **__: pytest.fail("was decoded"))
    request = generate_pb2.GenerateRequest(
        input_ids=[363, 366, 1],
        sampling=generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=5),
    )
    with pytest.raises(PromptTooLongError, match="has 11 tokens with its images expanded"):
        PromptChecker(tiny_model_path, max_tokens=11).check(request, [_file(Image.new("RGB", (96, 96)))])


@pytest.mark.parametrize("format_name", ["TIFF", "BMP", "PPM", "ICO", "TGA", "EPS", "PCX"])
def test_only_four_formats_are_opened(format_name: str) -> None:
    """Pillow's other readers, one of which starts Ghostscript, are never reached."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format_name)
    with pytest.raises(InvalidRequestError, match="send a complete PNG, JPEG, WebP or GIF"):
        decode_image(file.getvalue())
    with pytest.raises(InvalidRequestError, match=r"images\[0\] .* send a complete PNG, JPEG, WebP or GIF"):
        read_sizes([file.getvalue()])


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_four_formats_are_read(format_name: str) -> None:
    """Size from the header, pixels from the file."""
    file = io.BytesIO()
    Image.new("RGB", (9, 8)).save(file, format_name)
    assert read_sizes([file.getvalue()]) == [(9, 8)]
    assert decode_image(file.getvalue()).size == (9, 8)
