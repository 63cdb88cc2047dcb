"""The curves of a run, drawn when it ends."""

import pytest

from services.trainer.telemetry.curves import reward_limits


@pytest.mark.parametrize(
    ("rewards", "bottom", "top"),
    [([0.2, 0.9], 0.0, 1.02), ([], 0.0, 1.02), ([-0.5, 0.5], -0.51, 1.02), ([10.0], 0.0, 10.2)],
)
def test_every_reward_is_on_the_axis(rewards: list[float], bottom: float, top: float) -> None:
    """Also where wrong answers score below 0."""
    assert reward_limits(rewards) == pytest.approx((bottom, top))
