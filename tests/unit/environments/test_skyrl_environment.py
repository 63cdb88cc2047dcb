"""A class of SkyRL-Gym's users is an environment."""

import base64
import math
import sys
from typing import Any

import pytest

from penstock.environments.adapters import SkyRLEnvironment
from penstock.errors import ConfigError, EnvironmentFailedError
from penstock.records import TextPart
from tests.support.foreign import env_skyrl
from tests.support.foreign.tasks import say, shown, task
from tests.support.worker.scripted_episodes import picture

HERE = env_skyrl.__name__
JPEG = picture(4, 3, form="JPEG")
URL = f"data:image/jpeg;base64,{base64.b64encode(JPEG).decode()}"


def begun(kind: str = "Guess", config: dict[str, Any] | None = None, **fields: Any) -> SkyRLEnvironment:
    """An environment after its reset."""
    environment = SkyRLEnvironment(f"{HERE}:{kind}", config=config)
    environment.reset(task(**fields))
    return environment


def test_the_policy_sees_what_init_returns() -> None:
    """The prompt's images unchanged; the row's tools are shown."""
    asked = task(images=(JPEG,), tools=({"type": "function"},), max_turns=4)
    first = SkyRLEnvironment(f"{HERE}:Guess").reset(asked)
    assert (first.messages[0], first.images, first.tools) == (asked.messages[0], (JPEG,), asked.tools)
    assert first.messages[1].parts == (TextPart(text="You have 4 turns."),)


def test_observations_rewards_and_metrics_of_a_step() -> None:
    """Pictures to the byte; rewards may come with each step; texts among the metrics are none."""
    result = begun(config={"rewards": {"bonus": 0.25}}, extra={"picture": URL}, max_turns=3).step(say("4"))
    assert result.observation is not None
    assert result.observation.images == (JPEG,)
    assert shown(result.observation) == [("user", ["JPEG (4, 3) (0, 0, 0)", "Again."])]
    assert (result.reward, result.metrics) == (0.25, {"steps": 1.0})


def test_done_ends_the_episode() -> None:
    """`truncated` of the metadata says whether it was cut short."""
    right = begun(max_turns=3).step(say("3"))
    assert (right.observation, right.truncated, right.reward) == (None, False, 1.0)
    cut = begun(max_turns=1).step(say("4"))
    assert (cut.observation, cut.truncated, cut.reward) == (None, True, 0.0)


def test_the_row_s_own_columns_come_first() -> None:
    """A column reward_spec is passed as it is; config.max_turns holds where the data have no limit."""
    environment = begun(config={"max_turns": 2}, extra={"reward_spec": {"ground_truth": "5"}, "picture": URL})
    assert environment.step(say("3")).observation is not None
    assert environment.step(say("5")).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "without observations, reward, done; add them"),
        ({"observations": [], "reward": 0.0}, "without done; add them"),
        ([1, 0.0, True], r"step of .*:Answers = \[1, 0.0, True\] must be a dict"),
        ({"observations": [], "reward": 0.0, "done": False}, "done = False and no observations; return a message"),
        ({"observations": [], "reward": math.nan, "done": True}, "reward of step of .*:Answers = nan must be a finite"),
        ({"observations": [], "reward": "1", "done": True}, "reward of step of .*:Answers = '1' must be a finite"),
        (
            {"observations": ["?"], "reward": 0, "done": False},
            r"observations of step of .*:Answers\[0\] = '\?' must be",
        ),
        (
            {"observations": [], "reward": 0, "done": True, "postprocessed_action": "cut"},
            "postprocessed_action = 'cut'; what the policy said is never rewritten",
        ),
    ],
)
def test_answers_that_cannot_be_played_name_class_method_and_value(answer: Any, reason: str) -> None:
    """So that a person finds the line."""
    with pytest.raises(EnvironmentFailedError, match=reason):
        begun("Answers", extra={"answers": [answer]}).step(say("said"))


def test_a_postprocessed_action_that_changes_nothing_is_taken() -> None:
    """Environments of SkyRL may name it in any case."""
    answer = {"observations": [], "reward": None, "done": True, "postprocessed_action": "said", "metadata": None}
    result = begun("Answers", extra={"answers": [answer]}).step(say("said"))
    assert (result.observation, result.reward) == (None, None)


def test_a_setting_that_is_missing_is_named() -> None:
    """With the place where it belongs."""
    with pytest.raises(AttributeError, match=r"has no 'rewards'; set it in args\.config"):
        SkyRLEnvironment(f"{HERE}:Guess")._config.rewards  # noqa: B018


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (f"{HERE}:Gues", "has no 'Gues'; name a class that it has"),
        ("no_such_package:Env", "install no_such_package where workers run"),
        ("gsm8k", 'env = "gsm8k" is a name of skyrl_gym, .*install skyrl_gym where workers run'),
    ],
)
def test_a_class_that_is_not_there_is_a_mistake_in_the_recipe(
    env: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the name and the remedy."""
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)  # `make test-adapters` may have installed it
    with pytest.raises(ConfigError, match=reason):
        SkyRLEnvironment.prepare(env)
