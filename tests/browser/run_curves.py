"""Curves, comparison of runs, alarms and the fleet, in a real Chromium."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page, expect

from services.view.run_reader import RunReader
from services.view.summary import alarms_of
from tests.browser.pages import num_clicks
from tests.support.view_runs import add_spans, step_row, write_rows


async def test_a_run_grows_without_a_reload(page: Page, runs: list[Path]) -> None:
    """A line counts when it is whole; a run that was resumed goes back."""
    with (runs[0] / "metrics.jsonl").open("a") as file:
        line = json.dumps(step_row(31)) + "\n"
        file.write(line[:20])
        file.flush()
        await page.wait_for_timeout(2500)
        await expect(page.locator("#status")).to_contain_text("step 30 of 200")
        file.write(line[20:])
    await expect(page.locator("#status")).to_contain_text("step 31 of 200", timeout=10_000)
    replaced = runs[0] / "new"
    replaced.write_text("".join(json.dumps(step_row(step)) + "\n" for step in range(1, 21)))
    replaced.replace(runs[0] / "metrics.jsonl")
    await expect(page.locator("#status")).to_contain_text("step 20 of 200", timeout=10_000)


async def test_charts_that_are_drawn_anew_are_freed(page: Page, runs: list[Path]) -> None:
    """A page that is left open beside a run draws them at each step."""
    await expect(page.locator("figure").first).to_be_visible()
    for step in range(31, 35):
        write_rows(runs[0], [step_row(step)])
        await expect(page.locator("#status")).to_contain_text(f"step {step} of 200", timeout=10_000)
    await page.wait_for_timeout(500)
    kept = await page.evaluate(
        "import('/vendor/uPlot.mjs').then(({ default: uPlot }) => uPlot.sync('step').plots.length)"
    )
    assert kept == await page.locator("figure .uplot").count() > 0


async def test_runs_are_compared(page: Page, runs: list[Path]) -> None:
    """Curves over each other, also over hours, of which runs share none, and settings that differ."""
    rows = [step_row(step, elapsed_s=2.0 * step + 0.7) for step in range(1, 31)]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    await page.get_by_role("checkbox", name="second").check()
    await expect(page.locator("figure").first).to_contain_text("second")
    of_steps = await _num_coloured(page.locator("figure canvas").first)
    await page.get_by_label("Over").select_option("time")
    await expect(page.locator("figure").first).to_contain_text("hours")
    assert await _num_coloured(page.locator("figure canvas").first) > of_steps / 2
    await page.get_by_role("link", name="Settings").click()
    await expect(page.locator("tbody tr")).to_have_count(1)
    await expect(page.locator("tbody tr")).to_contain_text("trainer.max_staleness")


async def _num_coloured(canvas: Locator) -> int:
    """Pixels of lines; axes and grid are grey."""
    found: int = await canvas.evaluate(
        """async (canvas) => {
            await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let at = 0; at < data.length; at += 4) {
                const [red, green, blue, alpha] = data.slice(at, at + 4);
                count += alpha > 0 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
            }
            return count;
        }"""
    )
    return found


async def test_a_metric_that_single_steps_have_is_drawn(page: Page, runs: list[Path]) -> None:
    """A value between gaps is part of no line."""
    metrics = runs[0] / "metrics.jsonl"
    rows = [step_row(step) for step in range(1, 31)]
    for row in rows[::2]:
        del row["dlogp_mean_current"]
    metrics.with_name("new").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics.with_name("new").replace(metrics)
    await page.reload()
    await expect(page.locator("h1")).to_have_text("Curves")
    assert await _num_coloured(page.locator("figure", has_text="dlogp_mean_current").locator("canvas")) > 0


async def test_charts_over_steps_are_not_zoomed_to_hours(page: Page) -> None:
    """Scores are always over steps."""
    await page.get_by_label("Over").select_option("time")
    await expect(page.locator("figure").first).to_contain_text("hours")
    whole = await _shown(page, "hours")
    of_scores = await _shown(page, "step")
    await _zoom(page, page.locator("figure .u-over").first)
    ((low, high),) = await _shown(page, "hours")
    assert whole == {(2 / 3600, 60 / 3600)}
    assert 2 / 3600 < low < high < 60 / 3600
    assert await _shown(page, "step") == of_scores


async def test_a_double_click_shows_all_of_every_chart(page: Page, runs: list[Path]) -> None:
    """Also on the scores, whose steps are fewer. Until then charts that are drawn anew are zoomed, too."""
    file = runs[0] / "evaluations.jsonl"
    row = json.loads(file.read_text())
    with file.open("a") as lines:
        lines.write(json.dumps(row | {"step": 16}) + "\n")
    await page.reload()
    await expect(page.locator("h1")).to_have_text("Curves")
    whole = {(1, 30), (15, 16)}
    assert await _shown(page, "step") == whole
    await _zoom(page, page.locator("figure .u-over").first)
    zoomed = await _shown(page, "step")
    ((low, high),) = zoomed
    assert 1 < low < 15 < 16 < high < 30
    await page.locator("#theme").click()  # draws them anew
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    await page.wait_for_timeout(500)
    assert await _shown(page, "step") == zoomed
    await page.locator("figure", has_text="Held-out score").locator(".u-over").dblclick()
    assert await _shown(page, "step") == whole


async def _zoom(page: Page, surface: Locator) -> None:
    """Drag over the middle half of a chart."""
    box = await surface.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    await page.mouse.down()
    await page.mouse.move(box["x"] + 3 * box["width"] / 4, box["y"] + 20, steps=5)
    await page.mouse.up()


async def _shown(page: Page, label: str) -> set[tuple[float, float]]:
    """From where to where the charts over `label` are drawn."""
    found: list[tuple[float, float]] = await page.evaluate(
        """(label) => import('/vendor/uPlot.mjs').then(({ default: uPlot }) =>
            uPlot.sync(label).plots.map(({ scales: { x } }) => [x.min, x.max]))""",
        label,
    )
    return {(low, high) for low, high in found}


async def test_curves_and_ages_of_tokens_are_read_by_keys(page: Page) -> None:
    """Arrows point at a step, Enter leads to its samples; the heat map says how old a step's tokens were."""
    curve = page.get_by_role("slider", name="Gradient norm")
    await curve.focus()
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        await page.keyboard.press(key)
    assert "step 28, " in (await curve.get_attribute("aria-valuetext") or "")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("step 28", exact=True)).to_be_visible()
    await page.get_by_role("link", name="Staleness").click()
    await page.get_by_role("img", name="Share of tokens").focus()
    for key in ("Home", "ArrowRight"):
        await page.keyboard.press(key)
    await expect(page.locator("main")).to_contain_text("step 2: 60.1% of age 0, 39.9% of age 1")


async def test_curves_are_zoomed_without_a_mouse(page: Page) -> None:
    """By keys around the step that they point at; by buttons, as on a phone, around the one that was picked."""
    whole = await _shown(page, "step")
    curve = page.get_by_role("slider", name="Gradient norm")
    await curve.focus()
    for key in ("Home", *"++++"):
        await page.keyboard.press(key)
    ((low, high),) = await _shown(page, "step")
    assert (low, high) == (1, pytest.approx(1 + 29 * 0.8**4))
    await page.keyboard.press("End")
    assert "step 30, " in (await curve.get_attribute("aria-valuetext") or "")
    ((low, high),) = await _shown(page, "step")
    assert (low, high) == (pytest.approx(30 - 29 * 0.8**4), 30)
    for key in "-----":
        await page.keyboard.press(key)
    assert await _shown(page, "step") == whole
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("step 30", exact=True)).to_be_visible()
    await page.get_by_role("button", name="zoom in").click()
    ((low, high),) = await _shown(page, "step")
    assert (low, high) == (pytest.approx(30 - 29 * 0.8**3), 30)
    await page.get_by_role("button", name="show all").click()
    assert await _shown(page, "step") == whole


async def test_a_page_goes_on_with_its_run_after_a_click_on_a_curve(page: Page, runs: list[Path]) -> None:
    """The click leaves the focus on the chart."""
    await page.locator("figure .u-over").first.click()
    write_rows(runs[0], [step_row(31)])
    await expect(page.locator("#status")).to_contain_text("step 31 of 200", timeout=10_000)
    await expect(page.locator("figure .u-over").first).to_have_attribute("aria-valuemax", "31")


async def test_alarms_are_counted_and_explained(page: Page, runs: list[Path]) -> None:
    """On the run that has them, each with its remedy."""
    await page.locator("#run").select_option(label="second")
    await expect(page.locator("nav .count")).to_have_text("2")
    await page.get_by_role("link", name="Alarms").click()
    await expect(page.get_by_role("alert").first).to_contain_text("groups failed in the last 5 steps")
    await expect(page.get_by_role("alert").first).to_contain_text("the samples page lists failed groups")
    remedies = await page.get_by_role("alert").locator("p.faint").all_inner_texts()
    assert remedies == [alarm["remedy"] for alarm in alarms_of(RunReader(runs[1]))]


async def test_an_alarm_without_a_step_appears_on_the_open_page(page: Page, runs: list[Path]) -> None:
    """A run that hangs trains no step that would draw the page again."""
    await page.get_by_role("link", name="Alarms").click()
    await expect(page.locator("main")).to_contain_text("Nothing is wrong")
    for name in ("metrics.jsonl", "evaluations.jsonl", "config.toml"):
        os.utime(runs[0] / name, (1_700_000_000, 1_700_000_000))
    with (runs[0] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the launcher of a run that goes on
        await expect(page.get_by_role("alert")).to_contain_text("stuck")


async def test_engines_are_listed_with_what_they_do(page: Page, runs: list[Path]) -> None:
    """Load, version, speed and pauses, from the spans that they sent last."""
    add_spans(runs[0])
    await page.get_by_role("link", name="Fleet").click()
    row = page.locator("tbody tr", has_text="engine-5")
    await expect(row).to_contain_text("rollout-0")
    await expect(row.locator("td").nth(2)).to_have_text("31")
    await expect(page.locator("tbody tr", has_text="ended")).to_contain_text("x")
    assert await num_clicks(page) == 1


async def test_marked_text_stays_while_the_run_goes_on(page: Page, runs: list[Path]) -> None:
    """Whoever copies an engine's numbers needs longer than a step; the news come when the mark is gone."""
    add_spans(runs[0])
    await page.get_by_role("link", name="Fleet").click()
    await page.locator("tbody tr", has_text="engine-5").evaluate("row => getSelection().selectAllChildren(row)")
    marked = await page.evaluate("String(getSelection())")
    assert "engine-5" in marked
    write_rows(runs[0], [step_row(31, push_pause_max_s=7.5)])
    await expect(page.locator("#status")).to_contain_text("step 31 of 200", timeout=10_000)
    assert await page.evaluate("String(getSelection())") == marked
    await page.evaluate("getSelection().removeAllRanges()")
    await expect(page.locator("main")).to_contain_text("7.5 s", timeout=10_000)
