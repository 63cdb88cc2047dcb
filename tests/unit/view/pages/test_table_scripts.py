"""What the pages of settings, engines and evaluations say in their tables."""

from typing import Any

import pytest

from tests.support.view_scripts import ViewScripts


@pytest.mark.parametrize(
    ("text", "only_different", "rows"),
    [
        (".", True, [["a.kind", '["x"]', '["x","y"]', '["x"]'], ["a.n", "4", "4", "–"], ["b.c", "one", "two", "–"]]),
        ("", False, None),
        (".n", False, [["a.n", "4", "4", "–"]]),
        ("same", True, []),
        ("same", False, [["a.same", "true", "true", "true"]]),
        ("nowhere", False, []),
    ],
)  # fmt: skip
def test_settings_of_runs_are_told_apart(
    scripts: ViewScripts, text: str, only_different: bool, rows: list[list[str]] | None
) -> None:
    """By name and by what their recipes say; one that a recipe lacks differs from every value."""
    all_settings: list[dict[str, Any]] = [
        {"b.c": "one", "a.n": 4, "a.same": True, "a.kind": ["x"]},
        {"a.n": 4, "a.same": True, "a.kind": ["x", "y"], "b.c": "two"},
        {"a.same": True, "a.kind": ["x"]},
    ]
    found = scripts.call("pages/settings.js", "matching", all_settings, text, only_different)
    assert found == rows or (rows is None and [name for name, *_ in found] == ["a.kind", "a.n", "a.same", "b.c"])


@pytest.mark.parametrize(
    ("served", "published", "text"),
    [(7, 7, "7"), (5, 7, "5 (2 behind)"), (8, 7, "8"), (0, 1, "0 (1 behind)"), (3, None, "3"), (None, 7, "–")],
)
def test_an_engine_says_how_far_it_is_behind(
    scripts: ViewScripts, served: int | None, published: int | None, text: str
) -> None:
    """The version that was published last. During a push an engine may be ahead of what is known."""
    assert scripts.call("pages/fleet.js", "version", served, published) == text


@pytest.mark.parametrize(
    ("replicas", "published", "text"),
    [
        (1, 7, "1 replica at the last step, version 7 was pushed last."),
        (0, None, "0 replicas at the last step."),
        (2, 0, "2 replicas at the last step, version 0 was pushed last."),
        (None, 3, "version 3 was pushed last."),
        (None, None, "No step has been trained yet."),
    ],
)
def test_the_fleet_is_summed_up(scripts: ViewScripts, replicas: int | None, published: int | None, text: str) -> None:
    """As far as the steps say it, with the time of which loads are means."""
    fleet = {"num_replicas": replicas, "published_version": published, "window_s": 60.0}
    shown = scripts.call("pages/fleet.js", "overview", fleet)
    assert shown == f"{text} Loads and rates are means over the last 60.0\u00a0s."


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        ({"value": 0.5, "standard_error": 0.0204}, "0.500 ± 0.020"),
        ({"value": 0, "standard_error": 0}, "0.000 ± 0.000"),
        ({"value": 0.12345, "standard_error": None}, "0.123"),
        ({"value": 1}, "1.000"),
        (None, "–"),
    ],
)
def test_an_estimate_has_its_standard_error(
    scripts: ViewScripts, estimate: dict[str, float | None] | None, text: str
) -> None:
    """If there is one, which a single answer does not have; a score of 0 is one."""
    assert scripts.call("pages/evaluation.js", "estimate", estimate) == text


@pytest.mark.parametrize(
    ("estimates", "value"),
    [({"1": 0.5, "2": 0.6, "16": 0.9, "8": 0.8}, 0.9), ({"1": 0.5}, 0.5), ({}, None)],
)
def test_the_estimate_of_most_answers_is_shown(
    scripts: ViewScripts, estimates: dict[str, float], value: float | None
) -> None:
    """By numbers: 16 answers are more than 8."""
    assert scripts.call("pages/evaluation.js", "atMost", estimates) == value
