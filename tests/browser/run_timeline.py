"""The timeline and the pushes that lead to it, in a real Chromium."""

import json
from pathlib import Path

from playwright.async_api import Browser, Page, expect

from tests.browser.pages import LONGEST_CLICKS, num_clicks, opened, served
from tests.support.view_runs import add_end, add_spans, make_run, step_row, write_rows


async def test_the_push_that_paused_longest_is_three_clicks_away(page: Page, runs: list[Path]) -> None:
    """The fleet's page lists pushes by their pauses, and leads to the timeline of the step."""
    metrics = runs[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[16] |= {"push_pause_max_s": 7.5, "push_pause_max_replica": "engine-9"}
    rows[20] |= {"push_pause_s": 0.4, "push_pause_max_s": 0.4}  # a longer mean, as all engines paused so long
    metrics.with_name("new").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics.with_name("new").replace(metrics)
    await page.get_by_role("link", name="Fleet").click()
    first = page.locator("h2", has_text="Pushes").locator("xpath=following-sibling::div[1]//tbody/tr").first
    await expect(first).to_contain_text("7.5 s")
    await expect(first).to_contain_text("engine-9")
    await first.get_by_role("link", name="17").click()
    await expect(page.locator("h1")).to_have_text("Timeline")
    await expect(page.get_by_label("Steps")).to_have_value("17")
    assert await num_clicks(page) <= LONGEST_CLICKS


async def test_a_bar_of_the_timeline_leads_to_its_sample(page: Page) -> None:
    """And says what it is."""
    await page.get_by_role("link", name="Timeline").click()
    await expect(page.get_by_text("The trainer's time:")).to_contain_text("training 66.7%, waiting for groups 33.3%")
    await _point_at_first_bar(page)
    await expect(page.locator("main")).to_contain_text("sample")
    await page.mouse.down()
    await page.mouse.up()
    await expect(page.locator("h1")).to_have_text("Group")


async def test_a_call_of_an_engine_leads_to_its_sample(page: Page, runs: list[Path]) -> None:
    """The engines' own spans say how long the call waited for its first token."""
    add_spans(runs[0])
    await page.get_by_role("link", name="Timeline").click()
    await expect(page.get_by_text("The trainer's time:")).to_be_visible()
    await _point_at_first_bar(page)
    await expect(page.locator("main")).to_contain_text("sample 0, 6 tokens, first token after 300 ms")
    await page.mouse.down()
    await page.mouse.up()
    await expect(page.locator("h1")).to_have_text("Group")


async def test_the_stages_of_a_push_are_in_their_engine_s_lane(page: Page, runs: list[Path]) -> None:
    """Below its calls and pauses."""
    add_spans(runs[0])
    await page.get_by_role("link", name="Timeline").click()
    await expect(page.get_by_text("The trainer's time:")).to_be_visible()
    await page.locator("canvas").focus()
    for key in ("ArrowRight", *["ArrowDown"] * 4):
        await page.keyboard.press(key)
    for text in ("50 ms: pause, version 21", "50 ms: receive, version 21", "50 ms: prepare, version 22"):
        await expect(page.locator("main")).to_contain_text(text)
        await page.keyboard.press("ArrowRight")


async def _point_at_first_bar(page: Page) -> None:
    """Move the mouse to the first bar below the trainer's and the pushes'."""
    surface = page.locator("canvas")
    found = await surface.evaluate(
        """(canvas) => {
            const pen = canvas.getContext("2d");
            const scale = canvas.width / canvas.clientWidth;
            for (let y = 62; y < canvas.clientHeight; y += 2) {
                for (let x = 140; x < canvas.clientWidth; x += 2) {
                    if (pen.getImageData(x * scale, y * scale, 1, 1).data[3] === 255
                        && pen.getImageData(x * scale, y * scale, 1, 1).data[2] !== 223) return [x + 2, y + 1];
                }
            }
            return null;
        }"""
    )
    await surface.hover(position={"x": found[0], "y": found[1]})


async def test_the_timeline_is_used_by_keys(page: Page, runs: list[Path]) -> None:
    """Arrows go from bar to bar and from lane to lane, Enter opens the sample."""
    add_spans(runs[0])
    await page.get_by_role("link", name="Timeline").click()
    await expect(page.get_by_text("The trainer's time:")).to_be_visible()
    await page.locator("canvas").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("main")).to_contain_text("step 19: waiting for groups, 600 ms")
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("main")).to_contain_text("step 19: training, 1.2 s")
    for _ in range(2):
        await page.keyboard.press("ArrowDown")
    await expect(page.locator("main")).to_contain_text("sample 0, 6 tokens")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("Group")


async def test_the_evaluation_of_the_last_step_is_on_the_timeline(page: Page, runs: list[Path]) -> None:
    """It comes after the last step, as one more."""
    add_spans(runs[0])
    add_end(runs[0])
    await page.get_by_role("link", name="Timeline").click()
    await page.get_by_role("button", name="later").click()
    await expect(page.get_by_text("31: after the last step")).to_be_visible()
    await expect(page.locator("main")).not_to_contain_text("null")
    await page.locator("canvas").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("main")).to_contain_text("evaluation, 20.0")


async def test_a_swipe_to_the_side_does_not_zoom(page: Page) -> None:
    """A trackpad sends it as many turns of a wheel that have no height."""
    await page.get_by_role("link", name="Timeline").click()
    await expect(page.get_by_text("The trainer's time:")).to_be_visible()
    surface = page.locator("canvas")
    await surface.hover()
    drawn = [await surface.evaluate("canvas => canvas.toDataURL()")]
    for x, y in ((200, 10), (0, -100)):
        await page.mouse.wheel(x, y)
        await page.wait_for_timeout(500)
        drawn.append(await surface.evaluate("canvas => canvas.toDataURL()"))
    assert drawn[0] == drawn[1] != drawn[2]


def _train(run: Path, step: int) -> None:
    """Add a step to a run that goes on."""
    with (run / "trace" / "trainer.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "spans": [["train_s", 1_700_000_000.0 + 2 * step, 1.2]]}) + "\n")
    write_rows(run, [step_row(step)])


async def _draw_anew(page: Page) -> None:
    """Have the page drawn again, with the other colours."""
    surface = await page.locator("canvas").element_handle()
    await page.locator("#theme").click()
    await page.wait_for_function("surface => !surface.isConnected", arg=surface)


async def test_the_timeline_goes_on_with_the_run(page: Page, runs: list[Path]) -> None:
    """A click between the bars does not end that. Whoever has zoomed sees the same steps until they want all."""
    await page.get_by_role("link", name="Timeline").click()
    shown = page.get_by_label("to", exact=True)
    await expect(shown).to_have_value("30")
    await page.locator("canvas").click(position={"x": 300, "y": 5})
    _train(runs[0], 31)
    await expect(shown).to_have_value("31", timeout=10_000)
    await page.get_by_role("button", name="zoom in").click()
    _train(runs[0], 32)
    await expect(page.locator("#status")).to_contain_text("step 32 of 200", timeout=10_000)
    await _draw_anew(page)
    await expect(shown).to_have_value("31")
    await page.get_by_role("button", name="show all").click()
    await expect(shown).to_have_value("32")
    _train(runs[0], 33)
    await expect(shown).to_have_value("33", timeout=10_000)


async def test_the_timeline_begins_before_the_first_step(browser: Browser, tmp_path: Path) -> None:
    """With what processes have done since the start, and goes on with the first step."""
    run = make_run(tmp_path / "new", num_steps=0)
    add_spans(run, num_steps=1)
    async with served([run]) as url, opened(browser, url) as page:
        await page.get_by_role("link", name="Timeline").click()
        await expect(page.get_by_text("Before the first step.")).to_be_visible()
        _train(run, 1)
        await expect(page.get_by_text("The trainer's time:")).to_be_visible(timeout=10_000)


async def test_the_timeline_before_the_first_step_stays_once_a_bar_is_chosen(browser: Browser, tmp_path: Path) -> None:
    """The first step is shown once all is wanted."""
    run = make_run(tmp_path / "new", num_steps=0)
    add_spans(run, num_steps=1)
    async with served([run]) as url, opened(browser, url) as page:
        await page.get_by_role("link", name="Timeline").click()
        await expect(page.get_by_text("Before the first step.")).to_be_visible()
        await page.locator("canvas").focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("main")).to_contain_text("first token after 300 ms")
        await page.locator("canvas").blur()
        _train(run, 1)
        await expect(page.locator("#status")).to_contain_text("step 1 of 200", timeout=10_000)
        await _draw_anew(page)
        await expect(page.locator("main")).to_contain_text("first token after 300 ms")
        await page.get_by_role("button", name="show all").click()
        await expect(page.get_by_text("The trainer's time:")).to_be_visible()


async def test_the_timeline_is_zoomed_by_buttons(page: Page) -> None:
    """A phone has neither wheel nor keys."""
    await page.get_by_role("link", name="Timeline").click()
    await expect(page.get_by_text("The trainer's time:")).to_be_visible()
    surface = page.locator("canvas")
    await surface.hover()  # waits until it is drawn
    whole = await surface.evaluate("canvas => canvas.toDataURL()")
    await page.get_by_role("button", name="zoom in").click()
    near = await surface.evaluate("canvas => canvas.toDataURL()")
    await page.get_by_role("button", name="zoom out").click()
    await page.get_by_role("button", name="zoom out").click()
    far = await surface.evaluate("canvas => canvas.toDataURL()")
    assert len({whole, near, far}) == 3
    await page.get_by_role("button", name="show all").click()
    await page.wait_for_function("whole => document.querySelector('canvas').toDataURL() === whole", arg=whole)
