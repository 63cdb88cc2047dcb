"""The pages of a run that was trained, with engines, a tool and pictures, in a real Chromium.

With `SCREENSHOTS=folder` its pages are also drawn there.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from penstock.testing.train_process import ROOT, started
from tests.browser.pages import opened, served

pytestmark = pytest.mark.timeout(900)

_NUM_STEPS, _GROUPS, _EVALUATED = 3, 2, 4
_SETTINGS = {
    "episodes.keep": "all",
    "trainer.num_steps": _NUM_STEPS,
    "trainer.groups_per_step": _GROUPS,
    "trainer.samples_per_group": 4,
    "trainer.optimizer.warmup_steps": 1,
    "rollout.replicas": 1,
    "evaluation.at_end": "true",
    "evaluation.sets.held_out.num_prompts": _EVALUATED,
    "evaluation.sets.held_out.samples_per_prompt": 2,
}


@pytest.fixture(scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """A finished run of three steps whose policy zooms into pictures, and of an evaluation."""
    overrides = [f"--{key}={value}" for key, value in _SETTINGS.items()]
    recipe = str(ROOT / "recipes" / "tiny-multi-turn.toml")
    tmp_path = tmp_path_factory.mktemp("trained")
    with started(tmp_path, recipe, f"--run.dir={tmp_path / 'runs'}", *overrides) as process:
        assert await asyncio.to_thread(process.wait, 600.0) == 0, process.tail()
        yield process.folder


@pytest.fixture
async def page(browser: Browser, run: Path) -> AsyncIterator[Page]:
    """Its first page."""
    async with served([run]) as url, opened(browser, url) as page:
        await expect(page.locator("#status")).to_contain_text(f"not running · step {_NUM_STEPS} of {_NUM_STEPS}")
        yield page


async def _draw(page: Page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        await page.wait_for_timeout(300)
        await page.screenshot(path=f"{folder}/trained-{name}.png", full_page=True)


async def _go(page: Page, name: str) -> None:
    await page.locator("nav").get_by_role("link", name=name).click()
    await expect(page.locator("h1")).to_have_text(name)


async def test_samples_have_their_pictures_tokens_and_turns(page: Page) -> None:
    """Those of the picture's sheet and of the tool; the trainer's numbers beside the engine's; what each side said."""
    await _go(page, "Samples")
    await _draw(page, "samples")
    await page.get_by_label("Sort by").select_option("turns")
    await expect(page).to_have_url(re.compile("sort=turns"))
    await page.get_by_label("Outcome").select_option("evaluated")
    await expect(page.locator("a.card")).to_have_count(_EVALUATED)
    await page.get_by_label("Outcome").select_option("trained")
    await expect(page.locator("a.card")).to_have_count(_NUM_STEPS * _GROUPS)
    await page.locator("a.card").first.click()
    await expect(page.locator("h1")).to_have_text("Group")
    rows = page.locator("table").first.locator("tbody tr")
    await expect(rows).to_have_count(4)
    numbers = [int(each) for each in await rows.locator("td:nth-child(5)").all_inner_texts()]
    await rows.nth(numbers.index(max(numbers))).get_by_role("link").click()
    await expect(page.locator("details .message.own").first).to_contain_text("policy, turn 0")
    await expect(page.locator("details .message", has_text="environment: zoom").first).to_be_visible()
    pictures = page.locator("main img")  # of the problem, and what the zoom showed
    widths = [
        await each.evaluate("image => image.decode().then(() => image.naturalWidth)") for each in await pictures.all()
    ]
    assert len(widths) >= 2
    assert min(widths) > 0
    await page.get_by_role("button", name="go to the largest difference").click()
    numbers_of_token = page.locator(".hover")
    for name in ("engine", "trainer", "difference", "ratio", "advantage", "version", "gradient yes"):
        await expect(numbers_of_token).to_contain_text(name)
    await _draw(page, "group")


async def test_the_timeline_has_every_process_and_leads_to_samples(page: Page) -> None:
    """What the trainer did, the engine's calls and the worker's slots; none of their spans was lost."""
    await _go(page, "Timeline")
    await expect(page.get_by_text("The trainer's time:")).to_contain_text("training ")
    await expect(page.locator("main")).not_to_contain_text("Spans were lost")
    await _draw(page, "timeline")
    await page.locator("canvas").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("main")).to_contain_text("step 1: ")
    told = page.locator("main p[aria-live]")
    while "first token after" not in await told.inner_text():  # the lanes of the trainer and of pushes come before
        before = await told.inner_text()
        await page.keyboard.press("ArrowDown")
        await expect(told).not_to_have_text(before)
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("Group")


async def test_the_other_pages_are_drawn(page: Page) -> None:
    """Nothing is missing that the run recorded."""
    await expect(page.locator("figure", has_text="log-probability")).to_be_visible()
    await _draw(page, "curves")
    for name, texts in {
        "Staleness": ["groups may be 1 old"],
        "Fleet": ["1 replica at the last step", "rollout-0", "Pushes", "trainer"],
        "Evaluation": ["held_out", "All evaluations"],
        "Settings": ["trainer.num_steps"],
        "Alarms": [],
    }.items():
        await _go(page, name)
        for text in texts:
            await expect(page.locator("main")).to_contain_text(text)
        await expect(page.locator("main .error[role=alert]")).to_have_count(0)
        await _draw(page, name.lower())
