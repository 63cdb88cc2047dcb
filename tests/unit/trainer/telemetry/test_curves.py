"""The curves of a run, drawn when it ends."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from services.trainer.telemetry.curves import draw_curves, draw_loss_curves, is_drawn, reward_limits
from services.trainer.telemetry.metrics_log import MetricsLog


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


@pytest.mark.leaves_behind("matplotlib keeps the fonts that it has read open", "descriptor")
def test_the_metrics_that_are_drawn_are_enough(tmp_path: Path) -> None:
    """The trainer reads no others of a long run: all of them would take gigabytes."""
    log, validations = MetricsLog(tmp_path, last_step=0), MetricsLog(tmp_path, last_step=0, name="validation")
    names = ("reward_mean", "loss", "staleness_mean", "staleness_max", "max_staleness", "dlogp_mean", "dlogp_max")
    for step in (1, 2, 3):
        row = {name: step / (place + 2) for place, name in enumerate(names)}
        row |= {"dlogp_max_current": step / 10, "environment/a/tool_use": step / 3, "first_turn_accuracy": step / 5}
        log.write({"step": step, "groups": [step], "grad_norm": 1.0, **row})
        validations.write({"step": step, "validation_loss": 1 / step, "validation_s": 1.0})
    assert all("groups" not in row and "grad_norm" not in row for row in log.rows(is_drawn))
    pictures = list[tuple[bytes, bytes]]()
    for keep in (lambda _: True, is_drawn):
        draw_curves(log.rows(keep), tmp_path / "curves.png", title="run")
        draw_loss_curves(log.rows(keep), validations.rows(keep), tmp_path / "losses.png", title="run")
        pictures.append(((tmp_path / "curves.png").read_bytes(), (tmp_path / "losses.png").read_bytes()))
    assert pictures[0] == pictures[1]
