"""How tokens are coloured and how they are read, in a real Chromium."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.support.view_runs import column

_BLUE, _ORANGE = (0, 114, 178), (213, 94, 0)
_VIEWS = {
    "trainer − engine": [(_BLUE, 0.375), (_ORANGE, 0.0), (_ORANGE, 0.75)],
    "ratio to the anchor": [(_BLUE, 0.75), (_ORANGE, 0.0), (_ORANGE, 0.75)],
    "age in versions": [(_ORANGE, 0.75), (_ORANGE, 0.375), (_ORANGE, 0.375)],
    "advantage": [(_BLUE, 0.75), (_ORANGE, 0.375), (_ORANGE, 0.75)],
    "surprise of the engine": [(_ORANGE, 0.15), (_ORANGE, 0.375), (_ORANGE, 0.75)],
    "entropy": [(_ORANGE, 0.15), (_ORANGE, 0.375), (_ORANGE, 0.75)],
}
"""Colour and opacity of the policy's own tokens of `_sequence` in each view: the largest value has 0.75."""


def _sequence(prompt_images: list[str]) -> dict[str, Any]:
    """Four tokens: one is the environment's, and of the policy's own three the second has no gradient."""
    return {
        "token_ids": column([5, 6, 7, 8], "<i4"),
        "texts": [" own", " foreign", " untrained", " last"],
        "own": column([1, 0, 1, 1], "u1"),
        "trained": column([1, 0, 1], "u1"),
        "versions": [[1, 3], [2, 4]],
        "engine_logprobs": column([-1.0, -2.5, -5.0]),
        "logprobs": column([-1.5, -2.5, -4.0]),
        "ratio": column([0.5, 1.0, 2.0]),
        "correction": column([1.0, 1.0, 1.0]),
        "advantages": column([-1.0, 0.5, 1.0]),
        "entropy": column([0.6, 1.5, 3.0]),
        "images": [*prompt_images, "cd" * 32],
    }


async def _open(page: Page, parameters: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Open a group of version 5 whose samples are `_sequence` each, after `change`."""

    async def answer(route: Route) -> None:
        response = await route.fetch()
        group = await response.json()
        group["version"] = 5
        for sample in group["samples"]:
            sample["sequences"] = [_sequence(group["images"])]
        change(group)
        await route.fulfill(json=group)

    await page.route("**/api/runs/0/episodes/*", answer)
    await page.goto(page.url.split("#")[0] + f"#group?run=0&n=3{parameters}")
    await expect(page.locator("h1")).to_have_text("Group")


@pytest.fixture
async def page_of_group(page: Page) -> Page:
    """A group of version 5 whose samples are `_sequence` each."""
    await _open(page, "", lambda group: None)
    return page


async def test_the_largest_difference_is_that_of_all_sequences(page: Page) -> None:
    """An agent's sample, or one whose history was cut, has several; another one is shown if it is chosen."""

    def fork(group: dict[str, Any]) -> None:
        larger = _sequence(group["images"]) | {"logprobs": column([-1.0, -2.5, -2.0])}
        group["samples"][1]["sequences"].append(larger)

    await _open(page, "&at=difference", fork)
    await expect(page.locator("h2", has_text="token by token")).to_have_text("Sample 1, token by token")
    await expect(page.get_by_label("Sequence")).to_have_value("1")
    await expect(page.locator(".hover")).to_contain_text("difference 3")
    await page.get_by_label("Sequence").select_option("0")
    await expect(page.locator(".hover")).to_contain_text("difference 1")
    await expect(page.locator("h2", has_text="token by token")).to_have_text("Sample 1, token by token")


async def _choose(page: Page, view: str) -> None:
    """Colour the tokens by `view`, which draws them again."""
    drawn = await page.locator(".tokens").element_handle()
    await page.get_by_label("Colour").select_option(label=view)
    await page.wait_for_function("drawn => !drawn.isConnected", arg=drawn)
    await expect(page.locator(".tokens")).to_be_visible()


async def _style(page: Page, text: str, name: str) -> str:
    """A computed style of the token with this text."""
    token = page.locator(".tokens span[data-n]", has_text=re.compile(rf"^\s*{text}$"))
    found: str = await token.evaluate("(token, name) => getComputedStyle(token)[name]", name)
    return found


def _colour(style: str) -> tuple[tuple[int, ...], float]:
    """Red, green and blue of a computed colour, and its opacity."""
    red, green, blue, *rest = map(float, re.findall(r"[0-9.]+", style))
    return (round(red), round(green), round(blue)), rest[0] if rest else 1.0


async def test_each_view_colours_the_policy_s_own_tokens(page_of_group: Page) -> None:
    """Blue for less and orange for more, the stronger the more; what is not the policy's own has none."""
    page = page_of_group
    await expect(page.get_by_label("Colour").locator("option")).to_have_text([*_VIEWS])
    for view, colours in _VIEWS.items():
        await _choose(page, view)
        for text, (colour, opacity) in zip(("own", "untrained", "last"), colours, strict=True):
            shown, strength = _colour(await _style(page, text, "backgroundColor"))
            assert (view, text, strength) == (view, text, pytest.approx(opacity, abs=0.01))
            assert opacity == 0 or (view, text, shown) == (view, text, colour)
        assert _colour(await _style(page, "foreign", "backgroundColor"))[1] == 0


async def test_tokens_without_gradient_are_dotted_and_those_of_others_pale(page_of_group: Page) -> None:
    """In every view alike, since that is no number."""
    for view in _VIEWS:
        await _choose(page_of_group, view)
        styles = {
            text: [await _style(page_of_group, text, name) for name in ("opacity", "textDecorationLine")]
            for text in ("own", "foreign", "untrained", "last")
        }
        assert styles == {
            "own": ["1", "none"],
            "foreign": ["0.65", "none"],
            "untrained": ["1", "underline"],
            "last": ["1", "none"],
        }
        assert await _style(page_of_group, "untrained", "textDecorationStyle") == "dotted"


async def test_a_picture_that_was_not_kept_is_named(page_of_group: Page) -> None:
    """By its hash; the server is not asked for it."""
    await expect(page_of_group.locator("main")).to_contain_text("picture 1 was not kept: sha256 cdcdcdcdcdcd…")
    await expect(page_of_group.locator(".pictures img")).to_have_count(1)
