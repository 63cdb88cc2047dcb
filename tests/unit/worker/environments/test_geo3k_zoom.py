"""A policy zooms into the picture: what it sees, and what it is told about wrong boxes."""

import io
from typing import Any

import pytest
from PIL import Image

from penstock.environments import StepResult
from penstock.errors import InvalidRequestError
from penstock.records import ImagePart
from services.rollout.worker.environments.geo3k_zoom import Geo3kZoom
from tests.support.worker.tool_calls import task, texts, turn

WHITE, RED, BLUE = (255, 255, 255), (255, 0, 0), (0, 0, 255)


def picture(size: tuple[int, int] = (400, 200), *, detail: tuple[int, int, int] = RED) -> bytes:
    """A white PNG with a coloured rectangle: in each direction from 50 % to 60 %."""
    image = Image.new("RGB", size, WHITE)
    box = (size[0] // 2, size[1] // 2, size[0] * 6 // 10, size[1] * 6 // 10)
    image.paste(detail, box)
    return png(image)


def png(image: Image.Image) -> bytes:
    """Its file."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


async def zoom(arguments: dict[str, Any], *images: bytes, **settings: Any) -> StepResult:
    """One call of the tool."""
    environment = Geo3kZoom(**settings)
    await environment.reset(task(images=images or (picture(),)))
    return await environment.step(turn(("zoom", arguments)))


def crop(result: StepResult) -> Image.Image:
    """The one picture that came back."""
    assert result.observation is not None
    [data] = result.observation.images
    assert data.startswith(b"\x89PNG")
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("unit", "box"), [("fraction", [0.4, 0.4, 0.7, 0.8]), ("thousandth", [400, 400, 700, 800])])
async def test_a_crop_is_enlarged_to_the_pictures_long_edge(unit: str, box: list[float]) -> None:
    """120 x 80 pixels become 400 x 266; the detail is where it was, three and a third times as large."""
    result = await zoom({"bbox_2d": box}, unit=unit)
    image = crop(result)
    assert image.size == (400, 266)
    left, top, right, bottom = 133, 66, 266, 133  # (200 - 160) * 10/3, (100 - 80) * 10/3, (240 - 160) * 10/3, ...
    for x, y in [(left + 8, top + 8), (right - 8, top + 8), (left + 8, bottom - 8), (right - 8, bottom - 8)]:
        assert image.getpixel((x, y)) == RED
    for x, y in [(left - 8, top + 8), (left + 8, top - 8), (right + 8, bottom - 8), (right - 8, bottom + 8), (0, 0)]:
        assert image.getpixel((x, y)) == WHITE


async def test_the_picture_is_inside_the_tools_reply() -> None:
    """After a text that says what it shows."""
    result = await zoom({"bbox_2d": [0.5, 0.5, 0.6, 0.6]})
    assert result.observation is not None
    [message] = result.observation.messages
    assert message.role == "tool"
    assert texts(result.observation) == ["Part [0.5, 0.5, 0.6, 0.6] of the picture, as 400 x 200 pixels:"]
    assert message.parts[-1] == ImagePart(index=0)
    assert set(crop(result).get_flattened_data()) == {RED}
    assert (result.reward, result.metrics) == (None, {"num_calls": 1, "num_failed_calls": 0, "tool_use": 1})


async def test_blanked_parts_show_nothing() -> None:
    """All else stays: what a policy earns less with them, it owed to what it saw."""
    shown, blank = [await zoom({"bbox_2d": [0.4, 0.4, 0.7, 0.8]}, blank=blank) for blank in (False, True)]
    assert set(crop(blank).get_flattened_data()) == {(128, 128, 128)}
    assert crop(blank).size == crop(shown).size
    assert texts(blank.observation) == texts(shown.observation)


async def test_the_whole_picture_comes_back_as_it_is() -> None:
    """Pixel by pixel."""
    image = crop(await zoom({"bbox_2d": [0, 0, 1, 1]}))
    assert image.tobytes() == Image.open(io.BytesIO(picture())).tobytes()


async def test_the_same_box_gives_the_same_bytes() -> None:
    """An image is known by its hash."""
    box = {"bbox_2d": [0.1, 0.2, 0.9, 0.7]}
    first, second = await zoom(box), await zoom(box)
    assert first.observation is not None
    assert second.observation is not None
    assert first.observation.images == second.observation.images


async def test_a_zoom_after_a_zoom_refers_to_the_original() -> None:
    """A crop is no new frame of reference."""
    environment = Geo3kZoom()
    await environment.reset(task(images=(picture(),)))
    await environment.step(turn(("zoom", {"bbox_2d": [0, 0, 0.3, 0.3]})))
    result = await environment.step(turn(("zoom", {"bbox_2d": [0.5, 0.5, 0.6, 0.6]})))
    assert set(crop(result).get_flattened_data()) == {RED}


async def test_a_crop_is_bounded_in_pixels() -> None:
    """It keeps its shape."""
    width, height = crop(await zoom({"bbox_2d": [0, 0, 0.5, 1]}, picture((3000, 3000)), max_pixels=100_000)).size
    assert width * height <= 100_000
    assert (width, height) == (223, 447)


async def test_a_row_of_several_pictures_says_which() -> None:
    """Counted from 1; with one picture nothing is asked."""
    environment = Geo3kZoom()
    first = await environment.reset(task(images=(picture(), picture(detail=BLUE))))
    assert first.tools[0]["function"]["parameters"]["required"] == ["bbox_2d", "image"]
    box = [0.5, 0.5, 0.6, 0.6]
    result = await environment.step(turn(("zoom", {"bbox_2d": box, "image": 2.0})))
    assert texts(result.observation) == ["Part [0.5, 0.5, 0.6, 0.6] of picture 2, as 400 x 200 pixels:"]
    assert set(crop(result).get_flattened_data()) == {BLUE}
    refused = [{"bbox_2d": box}, {"bbox_2d": box, "image": 3}, {"bbox_2d": box, "image": 0}]
    words = texts((await environment.step(turn(*(("zoom", each) for each in refused)))).observation)
    assert [text.partition(": the arguments do not fit: ")[2] for text in words] == [
        "'image' is a required property",
        "image: 3 is greater than the maximum of 2",
        "image: 0 is less than the minimum of 1",
    ]
    [single] = (await Geo3kZoom().reset(task(images=(picture(),)))).tools
    assert set(single["function"]["parameters"]["properties"]) == {"bbox_2d"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bbox_2d": [0.7, 0.4, 0.4, 0.8]}, "is reversed or empty"),
        ({"bbox_2d": [0.4, 0.8, 0.7, 0.4]}, "is reversed or empty"),
        ({"bbox_2d": [0.4, 0.4, 0.4, 0.8]}, "is reversed or empty"),
        ({"bbox_2d": [-0.1, 0, 0.5, 0.5]}, "is outside"),
        ({"bbox_2d": [0, 0, 0.5, 1.01]}, "is outside"),
        ({"bbox_2d": [120, 40, 300, 180]}, "not in any other unit"),
        ({"bbox_2d": [0.5, 0.5, 0.519, 0.9]}, "is too small: each edge must be at least 0.02"),
        ({"bbox_2d": [0.5, 0.5, 0.9, 0.519]}, "is too small"),
        ({"bbox_2d": [float("nan"), 0, 1, 1]}, "NaN and infinity"),
        ({"bbox_2d": [0, 0, float("inf"), 1]}, "NaN and infinity"),
        ({"bbox_2d": ["0", "0", "1", "1"]}, "bbox_2d[0]: '0' is not of type 'number'"),
        ({"bbox_2d": "0, 0, 1, 1"}, "bbox_2d: '0, 0, 1, 1' is not of type 'array'"),
        ({"bbox_2d": [0, 0, 1]}, "[0, 0, 1] is too short"),
        ({"bbox_2d": [0, 0, 1, 1, 1]}, "[0, 0, 1, 1, 1] is too long"),
        ({}, "'bbox_2d' is a required property"),
        ({"bbox": [0, 0, 1, 1]}, "'bbox_2d' is a required property"),
        ({"bbox_2d": [10**400, 0, 1, 1]}, "is outside"),
    ],
)
async def test_a_bad_box_is_answered_in_words(arguments: dict[str, Any], words: str) -> None:
    """Without a picture; the episode goes on."""
    result = await zoom(arguments)
    assert result.observation is not None
    assert result.observation.images == ()
    assert words in texts(result.observation)[0]
    assert result.metrics["num_failed_calls"] == 1


async def test_fractions_are_refused_where_thousandths_are_declared() -> None:
    """They would be a box of a pixel; and the smallest edge is counted in the same unit."""
    [words] = texts((await zoom({"bbox_2d": [0.1, 0.1, 0.9, 0.9]}, unit="thousandth")).observation)
    assert "looks like fractions: write left" in words
    [words] = texts((await zoom({"bbox_2d": [100, 100, 119, 900]}, unit="thousandth")).observation)
    assert "each edge must be at least 20" in words


async def test_the_smallest_box_is_taken() -> None:
    """0.12 - 0.1 is not quite 0.02 in binary."""
    assert crop(await zoom({"bbox_2d": [0.1, 0.1, 0.12, 0.12]})).size == (400, 200)


async def test_a_strip_that_no_model_takes_is_answered_in_words() -> None:
    """Image processors refuse it, which would end the sample."""
    [words] = texts((await zoom({"bbox_2d": [0, 0, 1, 0.02]}, picture((1000, 100)))).observation)
    assert words == "Error in zoom: a part of 1000 x 2 pixels is too narrow: make its short edge longer"


async def test_a_bomb_is_not_decoded() -> None:
    """A file of a few kilobytes that claims ten thousand million pixels."""
    bomb = bytearray(picture())
    bomb[16:24] = (100_000).to_bytes(4, "big") * 2
    [words] = texts((await zoom({"bbox_2d": [0, 0, 1, 1]}, bytes(bomb))).observation)
    assert words.startswith("Error in zoom: ")
    assert "pixels" in words or "cannot be decoded" in words


async def test_a_row_without_a_picture_is_refused() -> None:
    """A fault of the data, with what to do."""
    with pytest.raises(InvalidRequestError, match="a row without a picture; give it rows with one"):
        await Geo3kZoom().reset(task())


async def test_further_tools_are_taken_by_name() -> None:
    """Beside zoom, and answered in the same turn."""
    environment = Geo3kZoom(tools=["calculator"])
    first = await environment.reset(task(images=(picture(),)))
    assert {tool["function"]["name"] for tool in first.tools} == {"zoom", "calculator"}
    said = turn(("calculator", {"expression": "6*7"}), ("zoom", {"bbox_2d": [0, 0, 1, 1]}))
    assert texts((await environment.step(said)).observation)[0] == "42"


async def test_the_answer_is_left_to_the_reward_service() -> None:
    """No tool use earns anything."""
    environment = Geo3kZoom()
    await environment.reset(task(images=(picture(),), golds=("5",)))
    end = await environment.step(turn(text="\\boxed{5}"))
    assert (end.observation, end.reward, end.truncated) == (None, None, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"unit": "pixel"}, "unit = 'pixel' must be one of fraction, thousandth"),
        ({"max_pixels": 10}, "max_pixels = 10 must be at least 1024"),
        ({"tools": ["hammer"]}, "'hammer'.* unknown; known: calculator, python"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    """By name, with what can be had."""
    with pytest.raises(ValueError, match=words):
        Geo3kZoom(**settings)
