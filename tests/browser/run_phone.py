"""The pages on a phone: a narrow screen that is touched, in a real Chromium."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from services.trainer.telemetry.episodes.files import EpisodeFiles
from tests.support.view_runs import add_group, add_spans

_PAGES = ("curves", "samples", "timeline", "staleness", "fleet", "evaluation", "settings", "alarms")
_LEAST_PX = 24
"""WCAG 2.2, 2.5.8: a target's size, or if it is smaller, twice the distance from its centre to its neighbours."""
_FIND_FAULTS = """(least) => {
    const name = (element) => `${element.tagName} ${element.getAttribute("aria-label") ?? element.textContent}`;
    const targets = [...document.querySelectorAll("a[href], button, input, select, summary")]
        .map((element) => element.closest("label") ?? element)
        .filter((element) => element.checkVisibility() && !element.matches(".skip"));
    const faults = [];
    const centre = ({ left, top, width, height }) => [left + width / 2, top + height / 2];
    for (const target of new Set(targets)) {
        target.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
        const place = target.getBoundingClientRect();
        const [x, y] = centre(place);
        const hit = document.elementFromPoint(x, y);
        if (!target.contains(hit)) faults.push(`${name(target)} is under ${hit && name(hit)}`);
        if (Math.min(place.width, place.height) >= least) continue;
        for (const other of targets) {
            if (other === target || other.contains(target) || target.contains(other)) continue;
            const { left, right, top, bottom } = other.getBoundingClientRect();
            const away = Math.hypot(x - Math.max(left, Math.min(x, right)), y - Math.max(top, Math.min(y, bottom)));
            if (away >= least / 2) continue;
            const size = `${Math.round(place.width)} x ${Math.round(place.height)}`;
            faults.push(`${name(target)}, ${size}, is ${away.toFixed(1)} from ${name(other)}`);
        }
    }
    return faults;
}"""
"""The controls of a page that a finger cannot tap or tell apart."""


@pytest.fixture
async def phone(browser: Browser, runs: list[Path], url: str) -> AsyncIterator[Page]:
    """The first page, opened on a phone, of two runs whose second has engines and alarms."""
    add_spans(runs[1])
    context = await browser.new_context(
        viewport={"width": 390, "height": 800}, device_scale_factor=2, is_mobile=True, has_touch=True
    )
    page = await context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    await page.goto(url)
    await expect(page.locator("h1")).to_have_text("Curves", timeout=30_000)  # a busy machine's first answers
    yield page
    await context.close()
    assert wrong == []


async def _open(page: Page, name: str) -> None:
    """Tap the page's link."""
    await page.locator("nav").get_by_role("link", name=name.capitalize()).tap()
    await expect(page.locator("h1")).to_have_text(name.capitalize())


async def test_every_control_can_be_tapped(phone: Page) -> None:
    """None is under another one, or so small and near to others that a finger takes the wrong one."""
    addresses = {name: f"{name}?run=1" for name in _PAGES}
    addresses |= {"group": "group?run=1&n=3", "compared": "curves?run=1&with=0", "filtered": "samples?run=1&step=7"}
    faults = {}
    for name, address in addresses.items():
        await phone.goto(f"{phone.url.split('#')[0]}#{address}")
        await expect(phone.locator("h1")).to_have_text(address.partition("?")[0].capitalize())
        await phone.wait_for_timeout(300)
        assert await phone.evaluate("visualViewport.scale") == 1, f"{name} is wider than the screen"
        faults[name] = await phone.evaluate(_FIND_FAULTS, _LEAST_PX)
    assert {name: found for name, found in faults.items() if found} == {}


async def test_every_page_is_reached_by_taps(phone: Page) -> None:
    """Their list is wider than the screen; the link of the page that is shown is in sight."""
    for name in (*_PAGES[1:], _PAGES[0]):
        await _open(phone, name)
        await expect(phone.locator("nav [aria-current]")).to_be_in_viewport(ratio=0.95)
        await expect(phone.locator("nav [aria-current]")).to_contain_text(name.capitalize())
    await phone.goto(phone.url.split("#")[0] + "#alarms")
    await expect(phone.locator("h1")).to_have_text("Alarms")
    await expect(phone.locator("nav [aria-current]")).to_be_in_viewport(ratio=0.95)
    await phone.locator("#run").select_option(label="second")
    await expect(phone.locator("nav .count")).to_have_text("2")
    await phone.locator("#theme").tap()
    await expect(phone.locator("html")).to_have_attribute("data-theme", "dark")


async def test_a_sample_is_read_by_taps(phone: Page) -> None:
    """From a curve's step to its worst sample, a token's numbers and the picture in its natural size."""
    await phone.locator("figure .u-over").first.tap(position={"x": 150, "y": 40})
    await phone.get_by_role("link", name="its worst samples").tap()
    await expect(phone.locator("h1")).to_have_text("Samples")
    await phone.locator("a.card").first.tap()
    await expect(phone.locator("h1")).to_have_text("Group")
    await phone.locator(".tokens span[data-n]").nth(3).tap()
    await expect(phone.locator(".hover")).to_contain_text("place 3")
    await phone.get_by_role("button", name="go to the largest difference").tap()
    await expect(phone.locator(".hover")).to_contain_text("difference")
    await phone.get_by_role("button", name="Enlarge picture 1").first.tap()
    picture = phone.locator("dialog img")
    await expect(picture).to_be_visible()
    await picture.tap()
    assert await picture.evaluate("image => image.clientWidth") == 48
    await phone.get_by_role("button", name="Close").tap()
    await expect(picture).to_be_hidden()


async def test_the_samples_of_a_group_fit_one_screen(phone: Page, runs: list[Path]) -> None:
    """Long answers are right of it: a row is as high as the columns that are in sight."""
    files = EpisodeFiles(runs[0] / "episodes", last_step=99, max_bytes=1e12)
    add_group(files, step=31, index=900, rewards=(1.0, 0.0) * 8, text="The figure has three corners. " * 6)
    await phone.goto(phone.url.split("#")[0] + "#group?run=0&n=30")
    rows = phone.locator(".scroll").first.locator("tr")
    await expect(rows).to_have_count(17)
    await rows.first.evaluate("row => row.scrollIntoView()")
    await expect(rows.last.get_by_role("link", name="15")).to_be_in_viewport(ratio=0.95)


async def test_the_timeline_and_the_ages_of_tokens_are_read_by_taps(phone: Page) -> None:
    """A tap points, at the trainer's bars and at a column of the heat map."""
    await _open(phone, "timeline")
    await expect(phone.get_by_text("The trainer's time:")).to_be_visible()
    canvas = phone.locator("canvas")
    await canvas.scroll_into_view_if_needed()
    await canvas.tap(position=await _first_bar(canvas))
    await expect(phone.locator("main")).to_contain_text("waiting for groups, 600 ms")
    drawn = await canvas.evaluate("canvas => canvas.toDataURL()")
    await phone.get_by_role("button", name="zoom in").tap()
    await phone.wait_for_function("drawn => document.querySelector('canvas').toDataURL() !== drawn", arg=drawn)
    await _open(phone, "staleness")
    await phone.locator("canvas").first.tap(position={"x": 200, "y": 30})
    await expect(phone.locator("main")).to_contain_text("of age 0")


async def _first_bar(canvas: Locator) -> dict[str, float]:
    """Where the first bar of the trainer's lane is."""
    x, y = await canvas.evaluate(
        """(canvas) => {
            const pen = canvas.getContext("2d");
            const scale = canvas.width / canvas.clientWidth;
            for (let y = 4; y < canvas.clientHeight; y += 2) {
                for (let x = 80; x < canvas.clientWidth; x += 2) {
                    const [red, green, blue, alpha] = pen.getImageData(x * scale, y * scale, 1, 1).data;
                    const isGrey = Math.max(red, green, blue) - Math.min(red, green, blue) < 60;
                    if (alpha === 255 && !isGrey) return [x + 2, y + 2];
                }
            }
            return null;
        }"""
    )
    return {"x": x, "y": y}
