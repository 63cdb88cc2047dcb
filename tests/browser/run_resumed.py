"""A run that goes on from its checkpoint, in a real Chromium: what its steps behind it had is taken back."""

from pathlib import Path

from playwright.async_api import Browser, Page, expect

from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.trainer.telemetry.metrics_log import keep_steps
from tests.support.view_runs import add_group, step_row, write_rows

_CHECKPOINT = 20


def _resume(run: Path) -> None:
    """Do what a trainer does that starts again, and train two steps."""
    for file in (run / "metrics.jsonl", run / "trace" / "trainer.jsonl"):
        keep_steps(file, last_step=_CHECKPOINT)
    files = EpisodeFiles(run / "episodes", last_step=_CHECKPOINT, max_bytes=1e12)
    for step in (21, 22):
        write_rows(run, [step_row(step, trainer_start=2, trainer_deaths=1)])
        add_group(files, step=step, index=4 * step, text=f"Step {step} once more.")


async def test_kept_groups_go_back_with_the_run(page: Page, runs: list[Path]) -> None:
    """An open list shows those before the checkpoint and those that were played since; the others are discarded."""
    run = runs[0]
    await page.get_by_role("link", name="Samples").click()
    await expect(page.get_by_text("30 of 30 kept groups")).to_be_visible()
    _resume(run)
    await expect(page.get_by_text("22 of 22 kept groups")).to_be_visible(timeout=10_000)
    cards = page.locator("a.card")
    await expect(cards).to_have_count(22)
    await expect(cards.first).to_contain_text("Step 22 once more.")
    await expect(cards.nth(2)).to_contain_text("step 20")
    assert len([*(run / "episodes" / "discarded").iterdir()]) == 10
    await cards.first.click()
    await expect(page.locator("h2", has_text="token by token")).to_be_visible()
    await expect(page.locator(".tokens")).to_contain_text("once more.")


async def test_a_link_to_a_discarded_group_says_so(browser: Browser, url: str, runs: list[Path]) -> None:
    """Somebody may have sent its address before the trainer died."""
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(url)
    await page.goto(page.url.split("#")[0] + "#group?run=0&n=20")  # the first that the resumed run plays again
    await expect(page.locator("h2", has_text="token by token")).to_be_visible()
    _resume(runs[0])
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("has no group number 20 now")
    await context.close()


async def test_curves_mark_the_restart(page: Page, runs: list[Path]) -> None:
    """And go back to the checkpoint; the evaluation before it stays."""
    await page.evaluate(
        """() => {
            window.written = new Set();
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                written.add(text);
                return write.call(this, text, ...rest);
            };
        }"""
    )
    await page.locator("#theme").click()  # draws the curves again
    await page.wait_for_function("() => written.has('eval')")
    assert not await page.evaluate("written.has('restart')")
    _resume(runs[0])
    await page.wait_for_function("() => written.has('restart')")
    await expect(page.locator("#status")).to_contain_text("step 22 of 200")
    await expect(page.locator("figure .u-over").first).to_have_attribute("aria-valuemax", "22")
