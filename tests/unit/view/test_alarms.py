"""What is called wrong with a run."""

from typing import Any

import pytest

from services.view.alarms import find_alarms
from tests.support.view_runs import step_row


def rows(num: int = 20, **last: Any) -> list[dict[str, Any]]:
    """Steps of a healthy run, of which the last five are as given."""
    return [step_row(step, **(last if step > num - 5 else {})) for step in range(1, num + 1)]


def test_a_healthy_run_has_no_alarm() -> None:
    """Nor has one that has not begun."""
    assert find_alarms(rows(), is_running=True, silent_s=5.0) == []
    assert find_alarms([], is_running=True, silent_s=500.0) == []


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("skipped", {"skipped": 1.0}),
        ("no gradient", {"num_steps_without_gradient": 12.0}),
        ("unjudged", {"num_unjudged_samples": 4}),
        ("no spread", {"zero_std_fraction": 0.95}),
        ("truncated", {"truncated_fraction": 0.5}),
        ("trainer idle", {"trainer_idle_fraction": 0.8}),
        ("dlogp", {"dlogp_mean_current": 0.02}),
        ("push", {"push_failed_replicas": 1}),
        ("failed groups", {"num_failed_groups": 3}),
        ("stale groups", {"num_stale_groups": 3}),
        ("not kept", {"num_episodes_dropped": 2}),
        ("restarts", {"trainer_start": 2}),
    ],
)
def test_each_fault_is_an_alarm_of_its_own(kind: str, last: dict[str, Any]) -> None:
    """With the last step that shows it, and a remedy."""
    (alarm,) = find_alarms(rows(**last))
    assert alarm.kind == kind
    assert 16 <= alarm.step <= 20
    assert alarm.remedy


def test_one_odd_batch_is_no_alarm() -> None:
    """Shares must be wrong in five steps in a row."""
    odd = [*rows()[:-1], step_row(20, zero_std_fraction=1.0, truncated_fraction=1.0, trainer_idle_fraction=1.0)]
    assert find_alarms(odd) == []


def test_a_step_that_does_not_come_is_an_alarm_while_the_run_goes_on() -> None:
    """Ten times as long as usual, and at least two minutes."""
    assert [alarm.kind for alarm in find_alarms(rows(), is_running=True, silent_s=121.0)] == ["stuck"]
    assert find_alarms(rows(), is_running=False, silent_s=1e6) == []
    slow = rows(step_s=60.0)
    assert find_alarms(slow[-5:], is_running=True, silent_s=500.0) == []
    assert find_alarms(slow[-5:], is_running=True, silent_s=601.0) != []
