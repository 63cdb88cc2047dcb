"""Whether a run is complete: nothing is left to do for a start that continues it."""

from pathlib import Path
from typing import Any

import pytest

from services.view.completion import is_complete
from tests.support.view_runs import step_row


def steps(*numbers: int) -> list[dict[str, Any]]:
    """Rows of these steps, of which there were 20 when they were taken."""
    return [step_row(number, num_steps=20) for number in numbers]


def write_recipe(folder: Path, *, num_steps: int = 20, evaluation: str = "") -> None:
    """The recipe of the last start."""
    (folder / "config.toml").write_text(f"[trainer]\nnum_steps = {num_steps}\n[evaluation]\n{evaluation}\n")


def test_a_run_is_complete_once_its_last_step_is_saved(tmp_path: Path) -> None:
    """A trainer that has died before that leaves its mark."""
    write_recipe(tmp_path)
    assert not is_complete(tmp_path, [], [])
    assert not is_complete(tmp_path, steps(18, 19), [])
    assert is_complete(tmp_path, steps(19, 20), [])
    (tmp_path / "metrics-running").write_text("0")
    assert not is_complete(tmp_path, steps(19, 20), [])


@pytest.mark.parametrize(("num_steps", "expected"), [(20, True), (24, False)])
def test_a_run_that_is_given_more_steps_is_not_complete(tmp_path: Path, num_steps: int, expected: bool) -> None:
    """The recipe says how many there are, also before the first of them."""
    write_recipe(tmp_path, num_steps=num_steps)
    assert is_complete(tmp_path, steps(20), []) is expected


@pytest.mark.parametrize(
    ("evaluation", "evaluated", "expected"),
    [
        ("at_end = true", [], False),
        ("at_end = true", [10], False),
        ("at_end = true", [10, 20], True),
        ("every = 5", [15], False),
        ("every = 5", [15, 20], True),
        ("every = 15", [15], True),
        ("at_start = true", [0], True),
    ],
)
def test_evaluations_of_the_last_step_are_part_of_it(
    tmp_path: Path, evaluation: str, evaluated: list[int], expected: bool
) -> None:
    """Those that its recipe asks for."""
    write_recipe(tmp_path, evaluation=evaluation)
    assert is_complete(tmp_path, steps(20), [{"step": step} for step in evaluated]) is expected


def test_an_evaluation_that_was_interrupted_is_part_of_it(tmp_path: Path) -> None:
    """Its replicas were held out beside training, and its weights are kept until it has ended."""
    write_recipe(tmp_path, evaluation="every = 15")
    (tmp_path / "evaluations/step-000015/weights").mkdir(parents=True)
    assert not is_complete(tmp_path, steps(20), [])
    assert is_complete(tmp_path, steps(20), [{"step": 15}])
