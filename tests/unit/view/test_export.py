"""Runs in one HTML file."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.export.excerpt import excerpt_of
from services.view.export.group_choice import order_of_groups
from services.view.export.page import export_runs
from services.view.run_reader import RunReader
from tests.support.view_runs import SHA, add_group, add_spans, make_run, png, step_row, write_rows

_SCRIPT = "</script><script>alert(1)</script>"


class _Elements(HTMLParser):
    """The elements of a page, as a browser reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        """Add to the last element's text."""
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def elements(page: bytes) -> list[tuple[str, dict[str, str | None], str]]:
    """The elements with their attributes and their text."""
    parser = _Elements()
    parser.feed(page.decode())
    return parser.found


def data_of(page: bytes) -> dict[str, Any]:
    """The runs' data in a page."""
    (text,) = [text for _, attributes, text in elements(page) if attributes.get("id") == "exported"]
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    """No address of another file, and scripts import each other by names that the file itself has."""
    page = export_runs([RunReader(make_run(tmp_path / "run"))]).page
    for _, attributes, _ in elements(page):
        assert "src" not in attributes
        assert attributes.get("href", "") in ("", "data:,", "#page")
    (imports,) = [json.loads(text)["imports"] for _, about, text in elements(page) if about.get("type") == "importmap"]
    assert {"penstock/main.js", "penstock/vendor/uPlot.mjs", "penstock/pages/fleet.js"} <= set(imports)
    for url in imports.values():
        source = base64.b64decode(url.partition(",")[2]).decode()
        assert set(re.findall(r'^(?:import|export)[^"]*from "([^"]+)"', source, re.MULTILINE)) <= set(imports)
        assert re.search(r'(from|import) "\.', source) is None


def test_a_page_has_what_the_server_would_answer(tmp_path: Path) -> None:
    """Steps, evaluations, settings, alarms, fleet, timeline, and groups with their pictures."""
    run = make_run(tmp_path / "run")
    add_spans(run)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"push_pause_max_s": 0.1', '"push_pause_max_s": 0.9', 1))
    exported = export_runs([RunReader(run)])
    (found,) = data_of(exported.page)["runs"]
    assert found["steps"]["step"] == list(range(1, 31))
    assert "groups" not in found["steps"]
    assert found["settings"]["trainer.num_steps"] == 200
    assert (len(found["index"]), len(found["episodes"])) == (30, 30)
    assert found["episodes"]["29"]["samples"][0]["text"] == "The answer is 3."
    assert base64.b64decode(found["images"][f"{SHA}.png"].partition(",")[2]) == png()
    assert [step["step"] for step in found["trace"]] == [1, *range(19, 31)]  # the first push paused an engine longest
    calls = [span for span in found["processes"] if span["name"] == "call"]
    assert [span["number"] for span in calls] == [0, *range(18, 30)]
    assert exported.left_out == ["run: the timeline but of steps 1, 19 to 30"]


def test_what_a_policy_wrote_stays_data(tmp_path: Path) -> None:
    """No text ends the element that holds it."""
    run = make_run(tmp_path / "run", num_steps=1)
    files = EpisodeFiles(run / "episodes", last_step=99, max_bytes=1e9)
    add_group(files, step=2, text=_SCRIPT, prompt=_SCRIPT)
    page = export_runs([RunReader(run)]).page
    assert b"alert(1)</script>" not in page
    assert data_of(page)["runs"][0]["episodes"]["1"]["samples"][0]["text"] == _SCRIPT


def test_a_file_is_bounded_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are thinned, the last one stays, and groups fill what is left."""
    monkeypatch.setattr("services.view.export.excerpt.MAX_ROWS", 7)
    run = make_run(tmp_path / "run")
    files = EpisodeFiles(run / "episodes", last_step=99, max_bytes=1e9)
    add_group(files, step=99, num_tokens=100_000)
    excerpt = excerpt_of(0, RunReader(run), max_bytes=60_000)
    assert excerpt.data["steps"]["step"] == [5, 10, 15, 20, 25, 30]
    number = len(excerpt.data["index"])
    assert 3 < number < 30
    assert (
        len(json.dumps(excerpt.data["images"])) + sum(len(bytes(each)) for each in excerpt.data["episodes"].values())
        < 60_000
    )
    assert excerpt.left_out[:2] == ["24 of 30 steps", f"{31 - number} of 31 kept groups"]
    assert excerpt.data["num_kept"] == 31
    assert "30" not in excerpt.data["episodes"]


def test_steps_and_spans_fit_into_a_run_s_share(tmp_path: Path) -> None:
    """Of several runs each has less room: fewer steps at equal distances up to the last, and the longest spans."""
    run = make_run(tmp_path / "run")
    wide = {f"metric_{number}": number / 7 for number in range(300)}
    (run / "metrics.jsonl").unlink()
    write_rows(run, [step_row(step, **wide) for step in range(1, 31)])
    add_spans(run)
    spans = [["tool", 1_700_000_050.0, 0.001 * number, {}] for number in range(1, 3001)]
    batch = {"process": "worker-0", "host": "a", "pid": 1, "start": "s", "number": 1, "dropped": 0, "sent": 0.0}
    with (run / "trace" / "spans-1700000000000.jsonl").open("a") as file:
        file.write(json.dumps({"sequence": 3, "stored": 0.0, "batch": batch | {"spans": spans}}) + "\n")
    excerpts = [excerpt_of(0, RunReader(run), max_bytes=max_bytes) for max_bytes in (10**7, 200_000)]
    whole, part = [excerpt.data for excerpt in excerpts]
    assert len(whole["steps"]["step"]) == 30
    assert len(msgspec.json.encode(part)) < 200_000
    steps = part["steps"]["step"]
    assert 5 < len(steps) < 30
    assert steps == list(range(30, 0, steps[-2] - 30))[::-1]
    assert 100 < len(part["processes"]) < len(whole["processes"])
    assert min(span["length"] for span in part["processes"] if span["name"] == "tool") > 2.0
    assert f"{30 - len(steps)} of 30 steps" in excerpts[1].left_out


def test_pictures_count_too(tmp_path: Path) -> None:
    """A group whose picture does not fit is left out."""
    run = make_run(tmp_path / "run")
    (run / "episodes" / "images" / f"{SHA}.png").write_bytes(b"x" * 200_000)
    excerpt = excerpt_of(0, RunReader(run), max_bytes=150_000)
    assert (excerpt.data["index"], excerpt.data["images"]) == ([], {})
    assert "30 of 30 kept groups" in excerpt.left_out


def test_groups_come_in_the_order_in_which_people_ask_for_them() -> None:
    """The newest, the one that differs most, the worst, the best, the last evaluation, what was left out."""

    def entry(step: int, outcome: str, dlogp: float | None, *rewards: float | None) -> dict[str, Any]:
        return {"step": step, "outcome": outcome, "dlogp_max": dlogp, "rewards": rewards}

    index = [
        entry(1, "trained", 0.1, 0.5),
        entry(2, "trained", 9.0, 0.5),
        entry(3, "trained", 0.1, 0.0, None),
        entry(4, "trained", 0.1, 1.0),
        entry(5, "evaluated", None, 0.5),
        entry(6, "failed", None),
        entry(7, "trained", 0.1, 0.5),
        entry(8, "trained", 0.1, None),
    ]
    order = list(order_of_groups(index))
    assert order[:6] == [7, 1, 2, 3, 4, 5]
    assert sorted(order) == list(range(8))
