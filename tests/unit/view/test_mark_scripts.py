"""The marks of the Curves' page: restarts, evaluations and pushes, and which of them are drawn."""

from typing import Any

import pytest

from tests.support.view_scripts import ViewScripts


def _rows(num_steps: int) -> list[dict[str, Any]]:
    """Steps of an hour each, every one with a push."""
    return [
        {"step": step, "elapsed_s": 3600 * step, "trainer_start": 1, "push_s": 0.2, "push_failed_replicas": 0}
        for step in range(1, num_steps + 1)
    ]


def _marks(scripts: ViewScripts, runs: list[dict[str, Any]], axis: str = "step") -> list[tuple[float, str]]:
    """Place and text of each mark; that of a tick is empty."""
    return [(mark["x"], mark["text"]) for mark in scripts.call("pages/curves.js", "marksOf", runs, axis)]


def test_restarts_evaluations_and_pushes_are_marked(scripts: ViewScripts) -> None:
    """A push that missed a replica is named, all others are ticks."""
    rows = _rows(5)
    rows[1]["push_failed_replicas"] = 1
    del rows[2]["push_s"]
    for row in rows[3:]:
        row["trainer_start"] = 2
    marks = _marks(scripts, [{"rows": rows, "evaluations": [{"step": 2}, {"step": 4}]}])
    assert marks == [(4, "restart"), (2, "push failed"), (2, "eval"), (4, "eval"), (1, ""), (4, ""), (5, "")]


@pytest.mark.parametrize("axis", ["step", "time"])
def test_an_evaluation_before_the_first_step_is_marked(scripts: ViewScripts, axis: str) -> None:
    """At 0, where the curves' axis begins then."""
    run = {"rows": _rows(3), "evaluations": [{"step": 0}, {"step": 2}, {"step": 9}]}
    evaluated = [place for place, text in _marks(scripts, [run], axis) if text == "eval"]
    assert evaluated == [0, 2], "step 9 is not there any longer"
    supervised = {"rows": [{"step": 1}], "evaluations": []}
    assert _marks(scripts, [supervised], axis) == []


def test_an_evaluation_is_marked_at_a_step_that_an_exported_page_leaves_out(scripts: ViewScripts) -> None:
    """It has every second step of a long run, or fewer."""
    run = {"rows": _rows(9)[::4], "evaluations": [{"step": 4}]}
    assert (4, "eval") in _marks(scripts, [run])
    assert (5, "eval") in _marks(scripts, [run], "time"), "the next step is known"


def test_marks_of_runs_that_are_compared_have_colours(scripts: ViewScripts) -> None:
    """And rows. Their pushes are at the same steps, and are left out."""
    runs = [{"rows": _rows(4), "evaluations": [{"step": 2}]}, {"rows": _rows(4), "evaluations": [{"step": 2}]}]
    marks = scripts.call("pages/curves.js", "marksOf", runs, "step")
    colours = scripts.run("return load('colours.js').SERIES")
    assert marks == [{"x": 2, "text": "eval", "row": row, "colour": colours[row]} for row in (0, 1)]
    assert "where one run is shown" in scripts.call("pages/curves.js", "aboutMarks", runs)


@pytest.mark.parametrize(
    ("num_pushes", "text"),
    [
        (0, ""),
        (60, "Ticks are pushes."),
        (61, "Ticks are pushes, one in 2; zoom in for more."),
        (1000, "Ticks are pushes, one in 17; zoom in for more."),
    ],
)
def test_the_page_says_how_many_pushes_have_a_tick(scripts: ViewScripts, num_pushes: int, text: str) -> None:
    """Never that ticks are pushes where there is none."""
    run = {"rows": _rows(num_pushes), "evaluations": []}
    assert scripts.call("pages/curves.js", "aboutMarks", [run]) == text
    drawn = scripts.call("chart.js", "drawnMarks", scripts.call("pages/curves.js", "marksOf", [run], "step"), 1, 1000)
    assert num_pushes / 17 <= len(drawn) <= 60


def test_of_many_ticks_every_nth_is_drawn(scripts: ViewScripts) -> None:
    """The same ones when the chart is moved, and all when it is zoomed; other marks always."""
    ticks = [{"x": step, "text": "", "isTick": True} for step in range(1, 1001)]
    restarts = [{"x": x, "text": "restart"} for x in (5, 500)]
    whole, moved, near = (
        [mark["x"] for mark in scripts.call("chart.js", "drawnMarks", [*restarts, *ticks], low, high)]
        for low, high in ((1, 1000), (101, 1100), (490, 510))
    )
    assert whole == [5, 500, *range(1, 1001, 17)]
    assert set(moved) <= {500, *range(1, 1001, 15)}
    assert near == [500, *range(490, 511)]


def test_labels_do_not_overlap(scripts: ViewScripts) -> None:
    """The first ones stay, which are the restarts; those of another run are in another row."""
    labels = [
        {"left": 50, "width": 30, "row": 0},
        {"left": 10, "width": 20, "row": 0},
        {"left": 75, "width": 20, "row": 0},
        {"left": 75, "width": 20, "row": 1},
        {"left": 84, "width": 20, "row": 0},
    ]
    assert scripts.call("chart.js", "freeLabels", labels) == [labels[0], labels[1], labels[3], labels[4]]
