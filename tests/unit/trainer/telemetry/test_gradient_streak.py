"""A run that learns nothing says so, once, with the cause."""

from typing import Any

import pytest
import structlog

from services.trainer.telemetry.gradient_streak import MAX_STEPS_IN_SILENCE, GradientStreak

LEARNS = {
    "grad_norm": 0.5,
    "rejected_fraction": 0.1,
    "zero_std_fraction": 0.5,
    "num_groups": 4.0,
    "num_groups_without_gradient": 2.0,
    "reward_mean": 0.3,
}
FLAT = LEARNS | {"grad_norm": 0.0, "zero_std_fraction": 1.0, "num_groups_without_gradient": 4.0, "reward_mean": 0.0}


def warnings(streak: GradientStreak, steps: list[dict[str, float]]) -> list[Any]:
    """What is logged over these steps."""
    with structlog.testing.capture_logs() as logs:
        for metrics in steps:
            streak.observe(metrics)
    return logs


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (FLAT, "filters.zero_variance"),
        (FLAT, "Groups with one judged sample are among them: see num_unjudged_samples"),
        ({"rejected_fraction": 1.0}, "rejection in [algorithm]"),
        ({"rejected_fraction": 1.0, "clamped_fraction": 0.25}, "rejection in [algorithm]"),
        ({"rejected_fraction": 1.0, "clamped_fraction": 0.75, "grad_norm": 0.0}, "75% of them for a log ratio"),
        ({"num_groups_without_gradient": 4.0}, "num_unjudged_samples"),
        ({"grad_norm": 0.0}, "num_masked_samples"),
    ],
)
def test_ten_steps_without_gradient_are_a_warning(changes: dict[str, float], cause: str) -> None:
    """Not nine; and once, however long it lasts, also where a regulariser has a gradient."""
    streak = GradientStreak()
    assert warnings(streak, [LEARNS | changes] * (MAX_STEPS_IN_SILENCE - 1)) == []
    [entry] = warnings(streak, [LEARNS | changes] * 30)
    assert (entry["event"], entry["log_level"], entry["num_steps"]) == ("gradient.missing", "warning", 10)
    assert cause in entry["reason"]


def test_a_step_with_a_gradient_starts_the_count_anew() -> None:
    """The metric is the length of the row, and the next row has a warning of its own."""
    streak = GradientStreak()
    found = [streak.observe(m)["num_steps_without_gradient"] for m in (FLAT, FLAT, LEARNS, FLAT)]
    assert found == [1, 2, 0, 1]
    assert len(warnings(streak, [FLAT] * 10 + [LEARNS] + [FLAT] * 10)) == 2


def test_groups_of_equal_rewards_can_teach() -> None:
    """Under reinforce_pp, which compares them with each other."""
    metrics = LEARNS | {"zero_std_fraction": 1.0, "num_groups_without_gradient": 0.0}
    assert GradientStreak().observe(metrics) == {"num_steps_without_gradient": 0}
