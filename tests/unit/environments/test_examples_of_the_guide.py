"""The examples of docs/rollouts/environments.md for other libraries' environments, as they stand there."""

from pathlib import Path
from typing import Any

import pytest

from services.recipe import Recipe
from services.rollout.worker.environments.loading import load_class, prepare
from tests.support.foreign.guide import write_example
from tests.support.foreign.tasks import say, shown, task


def environment_of(heading: str, name: str, folder: Path) -> Any:
    """The environment that the section's recipe calls `name`."""
    said = write_example(heading, folder)
    config = Recipe.model_validate({"worker": said["worker"]}).worker.environments[name]
    factory = load_class(config.class_, config.args)
    prepare(factory)
    return factory()


def test_the_example_for_slime_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong guess is told, a right one ends the episode."""
    monkeypatch.chdir(tmp_path)
    environment = environment_of("slime", "guess", tmp_path)
    environment.reset(task())
    assert shown(environment.step(say("4")).observation) == [("user", ["Wrong, guess again."])]
    last = environment.step(say("3"))
    assert (last.observation, last.metrics) == (None, {"score": 1.0})


def test_the_example_for_trl_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt says the target, the tool counts, and the end is rewarded."""
    monkeypatch.chdir(tmp_path)
    environment = environment_of("TRL", "count", tmp_path)
    first = environment.reset(task())
    assert (shown(first), len(first.tools)) == ([("user", ["Guess.", " Count to 3."])], 1)
    assert shown(environment.step(say("", ("add", {"number": 3}))).observation) == [("tool", ["3"])]
    assert environment.step(say("Done.")).reward == 1.0
    environment.close()


@pytest.mark.parametrize("heading", ["SkyRL-Gym", "reasoning-gym"])
def test_the_recipes_of_the_others_are_valid(heading: str, tmp_path: Path) -> None:
    """Their code needs these packages; `make test-adapters` runs it."""
    Recipe.model_validate(write_example(heading, tmp_path))
