"""What all pages share in a real Chromium: token, keyboard, colours, sizes, the exported file.

With `SCREENSHOTS=folder` every page is also drawn there, wide and narrow, light and dark.
"""

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.async_api import Browser, Page, Route, expect

from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.episode_query import EpisodeQuery
from services.view.export.page import export_runs
from services.view.run_reader import RunReader
from tests.browser.pages import SCRIPT, opened
from tests.support.view_runs import add_group, add_spans

_PAGES = ("curves", "samples", "timeline", "staleness", "fleet", "evaluation", "settings", "alarms")


async def test_the_token_leaves_the_address(page: Page) -> None:
    """So it is not copied with it."""
    assert "secret" not in page.url


async def test_a_page_that_comes_late_does_not_replace_the_one_that_was_chosen_after_it(page: Page) -> None:
    """A search through all samples takes a second."""
    may_answer = asyncio.Event()

    async def answer_late(route: Route) -> None:
        await may_answer.wait()
        await route.continue_()

    await page.route("**/api/runs/*/episodes*", answer_late)
    await page.get_by_role("link", name="Samples").click()
    await page.get_by_role("link", name="Settings").click()
    await expect(page.locator("h1")).to_have_text("Settings")
    async with page.expect_response("**/api/runs/*/episodes*"):
        may_answer.set()
    await page.wait_for_timeout(500)
    await expect(page.locator("h1")).to_have_text("Settings")


async def test_a_page_that_failed_comes_once_the_server_is_back(browser: Browser, url: str) -> None:
    """The first one, and one that is chosen later."""
    is_away = True

    async def answer(route: Route) -> None:
        await (route.abort() if is_away else route.continue_())

    context = await browser.new_context()
    page = await context.new_page()
    await page.route("**/api/**", answer)
    await page.goto(url)
    await expect(page.get_by_role("alert")).to_be_visible()
    is_away = False
    await expect(page.locator("h1")).to_have_text("Curves", timeout=10_000)
    is_away = True
    await page.get_by_role("link", name="Samples").click()
    await expect(page.get_by_role("alert")).to_be_visible()
    is_away = False
    await expect(page.locator("h1")).to_have_text("Samples", timeout=10_000)
    await context.close()


async def test_a_link_can_be_clicked_slowly(page: Page) -> None:
    """The list of pages is brought up to date every two seconds; a click begins and ends on the same link."""
    link = page.get_by_role("link", name="Samples")
    await link.hover()
    await page.mouse.down()
    for _ in range(2):  # the second is asked for when the first has been shown
        async with page.expect_response("**/api/runs"):
            pass
    await page.mouse.up()
    await expect(page.locator("h1")).to_have_text("Samples")


async def test_an_exported_file_is_used_without_a_server(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    """Every page, the filters and their order, the pictures; and it asks for nothing."""
    add_spans(runs[0])
    files = EpisodeFiles(runs[0] / "episodes", last_step=99, max_bytes=1e12)
    add_group(files, step=31, index=900, text=SCRIPT, rewards=(None, 0.25), outcome="failed", reason="odd")
    readers = [RunReader(folder) for folder in runs]
    file = tmp_path / "out.html"
    file.write_bytes(export_runs(readers).page)
    async with opened(browser, file.as_uri(), own="file://") as page:
        await expect(page.locator("#note")).to_contain_text("Left out: the timeline but of steps 19 to 30.")
        for name in _PAGES[1:]:
            await page.locator("nav").get_by_role("link", name=name.capitalize()).click()
            await expect(page.locator("h1")).to_have_text(name.capitalize())
            await expect(page.locator("main .error[role=alert]")).to_have_count(0)
        for query in (
            {},
            {"sort": "reward"},
            {"sort": "dlogp", "descending": "false"},
            {"text": "script ODD"},
            {"step": "7"},
        ):
            await page.goto(f"{file.as_uri()}#samples?{urlencode({'run': 0, **query})}")
            await _expect_groups(page, readers[0].find_episodes(EpisodeQuery(**_typed(query)))[1].places)
        await page.goto(f"{file.as_uri()}#group?run=0&n=29")
        picture = page.locator(".pictures img").first
        assert await picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 48
        await page.goto(f"{file.as_uri()}#group?run=0&n=30")
        await expect(page.locator("main")).to_contain_text(SCRIPT)
        assert await page.title() == "Group · first"
        if folder := os.environ.get("SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/exported.png", full_page=True)


def _typed(query: dict[str, str]) -> dict[str, Any]:
    changes: dict[str, Any] = dict(query)
    if "step" in query:
        changes["step"] = int(query["step"])
    if "descending" in query:
        changes["descending"] = query["descending"] != "false"
    return changes


async def _expect_groups(page: Page, numbers: list[int]) -> None:
    """Wait until these groups are listed, in this order."""
    await page.wait_for_function(
        """(numbers) => {
            const cards = [...document.querySelectorAll("a.card")];
            return cards.map((card) => new URLSearchParams(card.hash.split("?")[1]).get("n")).join() === numbers.join();
        }""",
        arg=numbers,
    )


async def test_the_keyboard_is_enough(page: Page) -> None:
    """The first stop leads past the pages' list, the next ones are its entries; a page that opens has the focus."""
    await page.keyboard.press("Tab")
    await expect(page.locator(".skip")).to_be_focused()
    for _ in range(2):
        await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("Samples")
    await expect(page.locator("#page")).to_be_focused()


async def test_the_system_s_colours_are_followed_until_somebody_chooses(page: Page) -> None:
    """Also when they change while the page is open."""
    theme = "document.documentElement.dataset.theme"
    assert await page.evaluate(theme) == "light"
    await page.emulate_media(color_scheme="dark")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    await page.locator("#theme").click()
    assert await page.evaluate(theme) == "light"
    await page.emulate_media(color_scheme="light")
    await page.emulate_media(color_scheme="dark")
    assert await page.evaluate(theme) == "light"
    await page.reload()
    await expect(page.locator("h1")).to_have_text("Curves")
    assert await page.evaluate(theme) == "light"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_pages_fit_laptop_and_phone(
    browser: Browser, runs: list[Path], url: str, width: int, scheme: Any
) -> None:
    """Nothing is wider than the screen."""
    add_spans(runs[1])
    files = EpisodeFiles(runs[1] / "episodes", last_step=99, max_bytes=1e12)
    text = "I zoom into the figure. <|vision_start|> <|image_pad|> <|vision_end|> It is larger now. I see it."
    add_group(files, step=31, index=900, text=text, num_tokens=15, num_answered=7, placeholders=(6,))
    context = await browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = await context.new_page()
    await page.goto(url)
    addresses = {name: f"{name}?run=1&n=3" for name in (*_PAGES, "group")} | {
        "conversation": "group?run=1&n=30",
        "compared": "curves?run=1&with=0",
    }
    for name, address in addresses.items():
        await page.goto(f"{page.url.split('#')[0]}#{address}")
        await expect(page.locator("h1")).to_have_text(address.partition("?")[0].capitalize())
        await page.wait_for_timeout(300)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, name
        if folder := os.environ.get("SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/{name}-{width}-{scheme}.png", full_page=True)
    await context.close()
