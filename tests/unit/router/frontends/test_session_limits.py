"""What a session's limits leave for the next answer."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.environments.pictures import read_picture
from penstock.errors import InvalidRequestError
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import Limits
from services.router.frontends.openai.errors import SessionLimitError
from services.router.frontends.openai.parsed_request import pack_ids
from services.router.frontends.openai.sessions.history import NextPrompt
from services.router.frontends.openai.sessions.limits import room_for_answer

PICTURE = read_picture(Image.new("RGB", (96, 96)), "a picture")
"""Of nine tokens."""
IMAGES = {"old": PICTURE, "new": PICTURE}


@pytest.fixture(scope="module")
def grid(tiny_model_path: Path) -> ImageGrid:
    """How the tiny model cuts images."""
    return ImageGrid.of(tiny_model_path)


def prompt(**changes: Any) -> NextPrompt:
    """A conversation of 31 tokens, images expanded; 13 are new, and 20 came between its first prompt and those."""
    fields: dict[str, Any] = {
        "continues": 3,
        "input_ids": pack_ids([1] * 10 + [2] * 5),
        "num_prefix": 10,
        "prefix_images": ["old"],
        "added_images": ["new"],
        "num_expanded": 8,
        "num_observed": 20,
        "conversation": "",
    }
    return NextPrompt(**(fields | changes))


@pytest.mark.parametrize(
    ("enough", "too_few", "words"),
    [
        ({"max_tokens": 32}, {"max_tokens": 31}, "has 31 tokens, and the session's max_tokens is 31; shorten it"),
        (
            {"max_observation_tokens": 33},
            {"max_observation_tokens": 32},
            "has 33 tokens that answer the policy, and the session's max_observation_tokens is 32; shorten it",
        ),
        ({"max_images": 2}, {"max_images": 1}, "has 2 images, and the session's max_images is 1; shorten it"),
        (
            {"max_pixels": 2 * 96 * 96},
            {"max_pixels": 2 * 96 * 96 - 1},
            "has 18432 pixels, and the session's max_pixels is 18431; shorten it",
        ),
    ],
)
def test_a_conversation_may_have_so_much(
    grid: ImageGrid, enough: dict[str, int], too_few: dict[str, int], words: str
) -> None:
    """To the token, new images expanded as the engine will."""
    room = room_for_answer(prompt(), Limits(**enough), IMAGES, grid)
    assert room == (1 if "max_tokens" in enough else None)
    with pytest.raises(SessionLimitError, match=words):
        room_for_answer(prompt(), Limits(**too_few), IMAGES, grid)


def test_a_first_prompt_is_no_answer_to_the_policy(grid: ImageGrid) -> None:
    """As in an environment's episode."""
    first = prompt(
        continues=0, num_prefix=0, input_ids=pack_ids([2] * 5), prefix_images=[], num_expanded=0, num_observed=0
    )
    assert room_for_answer(first, Limits(max_observation_tokens=1, max_tokens=20), IMAGES, grid) == 20 - 13


def test_what_begins_an_answer_takes_room_of_it(grid: ImageGrid) -> None:
    """It is a part of the conversation, and no answer to the policy."""
    limits = Limits(max_tokens=40, max_observation_tokens=33)
    assert room_for_answer(prompt(), limits, IMAGES, grid, num_begun=8) == 40 - 31 - 8
    with pytest.raises(SessionLimitError, match="has 40 tokens, and the session's max_tokens is 40; shorten it"):
        room_for_answer(prompt(), limits, IMAGES, grid, num_begun=9)


def test_images_are_read_only_to_be_counted(grid: ImageGrid) -> None:
    """What is none is refused in words where it would count; a model without images has no tokens of them."""
    broken = {"old": PICTURE, "new": b"no picture"}
    assert room_for_answer(prompt(), Limits(max_turns=3, max_images=2), broken, grid) is None
    assert room_for_answer(prompt(), Limits(max_tokens=32), broken, None) == 32 - 23
    with pytest.raises(InvalidRequestError, match=r"images\[0\]"):
        room_for_answer(prompt(), Limits(max_tokens=32), broken, grid)
