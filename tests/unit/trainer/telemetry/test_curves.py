"""The curves of a run, drawn when it ends."""

from pathlib import Path

import pytest

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
