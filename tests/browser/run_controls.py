"""Fields, buttons and sliders of the pages, used by mouse and keys in a real Chromium."""

import json
import re
from pathlib import Path

from playwright.async_api import Locator, Page, expect

from services.trainer.telemetry.episodes.files import EpisodeFiles
from tests.support.view_runs import add_group, step_row, write_rows


async def _open(page: Page, name: str) -> None:
    """Go to a page by its link."""
    await page.locator("nav").get_by_role("link", name=name).click()
    await expect(page.locator("h1")).to_have_text(name)


async def _enter(page: Page, field: Locator, text: str, key: str = "Enter") -> None:
    """Type a text in place of what the field holds, and leave it with a key."""
    await field.click()
    await field.fill("")
    await page.keyboard.type(text)
    await page.keyboard.press(key)


async def test_samples_are_found_by_words_outcome_and_ending(page: Page, runs: list[Path]) -> None:
    """The fields narrow the list together; one link shows all again."""
    files = EpisodeFiles(runs[0] / "episodes", last_step=99, max_bytes=1e12)
    add_group(files, step=31, index=900, outcome="stale", prompt="How many edges has the figure?")
    add_group(files, step=31, index=901, prompt="How many edges has it?")
    await _open(page, "Samples")
    number = page.get_by_text(re.compile(r"^\d+ of 32 kept groups$"))
    await expect(number).to_have_text("32 of 32 kept groups")
    search = page.get_by_role("searchbox", name="Search")
    await _enter(page, search, "EDGES")
    await expect(number).to_have_text("2 of 32 kept groups")
    await expect(search).to_be_focused()
    await page.get_by_label("Outcome").select_option("stale")
    await expect(number).to_have_text("1 of 32 kept groups")
    await expect(page.locator("a.card")).to_contain_text("How many edges has the figure?")
    await page.get_by_label("Ended by").select_option("length")
    await expect(page.locator("main")).to_contain_text("No group is like that.")
    await page.get_by_role("link", name="show all").click()
    await expect(number).to_have_text("32 of 32 kept groups")
    await expect(search).to_have_value("")


async def test_samples_of_a_step_are_found_and_their_order_is_turned(page: Page) -> None:
    """The step is typed; the order is turned by mouse and by keys."""
    await _open(page, "Samples")
    cards = page.locator("a.card")
    await expect(cards.first).to_contain_text("step 30")
    order = page.get_by_role("button", name="first")
    await expect(order).to_have_text("highest first")
    await order.click()
    await expect(cards.first).to_contain_text("step 1")
    await expect(order).to_have_text("lowest first")
    await order.focus()
    await page.keyboard.press("Space")
    await expect(cards.first).to_contain_text("step 30")
    step = page.get_by_role("spinbutton", name="Step")
    await _enter(page, step, "7", key="Tab")
    await expect(cards).to_have_count(1)
    await expect(cards).to_contain_text("step 7")
    await _enter(page, step, "")
    await expect(cards).to_have_count(30)


async def test_long_lists_of_samples_have_pages(page: Page, runs: list[Path]) -> None:
    """A hundred each; a filter begins with the first again."""
    index = runs[0] / "episodes" / "index.jsonl"
    entries = [json.loads(line) for line in index.read_text().splitlines()]
    with index.open("a") as file:
        for number in range(len(entries), 230):
            file.write(json.dumps(entries[number % len(entries)] | {"number": number, "step": number}) + "\n")
    await _open(page, "Samples")
    shown, cards = page.get_by_text(re.compile(r"^\d+ to \d+$")), page.locator("a.card")
    before, after = (page.get_by_role("button", name=name, exact=True) for name in ("before", "next"))
    await expect(shown).to_have_text("1 to 100")
    await expect(before).to_have_count(0)
    await after.click()
    await expect(shown).to_have_text("101 to 200")
    await expect(cards.first).to_contain_text("step 129")
    await after.focus()
    await page.keyboard.press("Enter")
    await expect(shown).to_have_text("201 to 230")
    await expect(cards).to_have_count(30)
    await expect(after).to_have_count(0)
    await before.click()
    await expect(shown).to_have_text("101 to 200")
    await page.get_by_label("Sort by").select_option("admission")
    await expect(shown).to_have_text("1 to 100")


async def test_curves_are_smoothed_by_their_slider(page: Page) -> None:
    """At its lower end they are the steps' own values, of which no line behind them is drawn; the keys reach it."""
    reward = page.locator("figure", has_text="Reward").first
    curves = reward.locator(".u-legend .u-series")
    await expect(curves).to_have_count(3)  # the step, the values of single steps and their mean
    drawn = await reward.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    slider = page.get_by_role("slider", name="Smoothing")
    await slider.focus()
    await page.keyboard.press("Home")
    await expect(curves).to_have_count(2)
    await expect(slider).to_be_focused()
    await expect(slider).to_have_value("0")
    assert await reward.locator("canvas").evaluate("canvas => canvas.toDataURL()") != drawn
    box = await slider.bounding_box()
    assert box is not None
    await page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    await expect(curves).to_have_count(3)
    assert float(await slider.input_value()) > 0.9


async def test_any_metric_of_the_steps_gets_a_chart(page: Page, runs: list[Path]) -> None:
    """Also one that a step has had only since the page was opened. A run that is compared goes again."""
    first = page.locator("figure figcaption").first
    await expect(first).to_contain_text("Reward")
    write_rows(runs[0], [step_row(31, my_metric=2.5)])
    await expect(page.locator("#status")).to_contain_text("step 31 of 200", timeout=10_000)
    also = page.get_by_label("Also")
    await also.select_option("my_metric")
    await expect(first).to_contain_text("my_metric")
    compared = page.get_by_role("checkbox", name="second")
    await compared.focus()
    await page.keyboard.press("Space")
    await expect(page.locator("figure", has_text="Gradient norm")).to_contain_text("second")
    await also.select_option("")
    await expect(first).to_contain_text("Reward")
    await compared.uncheck()
    await expect(page.locator("figure", has_text="Gradient norm")).not_to_contain_text("second")


async def test_settings_are_searched_by_a_part_of_their_names(page: Page) -> None:
    """Those in which runs differ, or all, by mouse and by keys."""
    await _open(page, "Settings")
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(1)
    toggle = page.get_by_role("button", name="only what differs")
    await expect(toggle).to_have_attribute("aria-pressed", "true")
    await toggle.click()
    await expect(rows).not_to_have_count(1)
    await expect(toggle).to_have_attribute("aria-pressed", "false")
    number = await rows.count()
    search = page.get_by_role("searchbox", name="Search")
    await _enter(page, search, "num_st")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("trainer.num_steps")
    await toggle.focus()
    await page.keyboard.press("Space")
    await expect(page.locator("main")).to_contain_text("The recipes do not differ.")
    await page.keyboard.press("Space")
    await expect(rows).to_have_count(1)
    await _enter(page, search, "")
    await expect(rows).to_have_count(number)
