"""The curves of a run, drawn when it ends."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from services.trainer.telemetry.curves import draw_curves, reward_limits


@pytest.mark.parametrize(
    ("rewards", "bottom", "top"),
    [([0.2, 0.9], 0.0, 1.02), ([], 0.0, 1.02), ([-0.5, 0.5], -0.51, 1.02), ([10.0], 0.0, 10.2)],
)
def test_every_reward_is_on_the_axis(rewards: list[float], bottom: float, top: float) -> None:
    """Also where wrong answers score below 0."""
    assert reward_limits(rewards) == pytest.approx((bottom, top))


@pytest.mark.leaves_behind("matplotlib keeps the fonts that it has read open", "descriptor")
def test_a_step_without_tokens_costs_no_curve(tmp_path: Path) -> None:
    """It has no log-probabilities, and a run that another release began may lack more: the others are drawn."""
    whole = {"reward_mean": 0.5, "staleness_mean": 1.0, "staleness_max": 2.0, "max_staleness": 2, "dlogp_mean": 1e-6}
    rows = [
        {"step": 1, **whole, "dlogp_max": 1e-5, "dlogp_max_current": 1e-6},
        {"step": 2, **{name: value for name, value in whole.items() if name != "dlogp_mean"}},
        {"step": 3},
    ]
    tools = [{"step": 1, "environment/geo3k_zoom/tool_use": 0.5, "first_turn_accuracy": 0.1}]
    for number, some in enumerate((rows, rows[2:], tools)):
        path = tmp_path / f"{number}.png"
        draw_curves(some, path, title="run")
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.leaves_behind("matplotlib keeps the fonts that it has read open", "descriptor")
def test_tool_use_and_first_turns_have_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as a line over the steps that measured it, named in the legend; a run without tools has no such axis."""
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    rows: list[dict[str, Any]] = [
        {"step": 1, "environment/geo3k_zoom/tool_use": 0.5, "first_turn_accuracy": 0.125},
        {"step": 2, "first_turn_accuracy": 0.25},
        {"step": 3, "environment/geo3k_zoom/tool_use": 0.75, "first_turn_accuracy": 0.375},
    ]
    for some in (rows, rows[1:2]):
        draw_curves(some, tmp_path / "curves.png", title="run")
    monkeypatch.undo()
    with_tools, without = figures
    assert (len(with_tools.axes), len(without.axes)) == (4, 3)
    axis = with_tools.axes[1]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}
    assert drawn == {
        "samples that used a tool (geo3k_zoom)": ([1, 3], [0.5, 0.75]),
        "right in the first turn": ([1, 2, 3], [0.125, 0.25, 0.375]),
    }
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [*drawn]
    for figure in figures:
        plt.close(figure)
