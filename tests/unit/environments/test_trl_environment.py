"""A class for TRL's environment_factory is an environment."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils import get_json_schema

from penstock.environments import Observation
from penstock.environments.adapters import TRLEnvironment
from penstock.errors import ConfigError, EnvironmentFailedError
from tests.support.foreign import env_trl
from tests.support.foreign.tasks import say, shown, task
from tests.support.worker.scripted_episodes import picture

HERE = env_trl.__name__


class Play:
    """Environments that are closed at the end."""

    def __init__(self) -> None:
        self.opened: list[TRLEnvironment] = []

    def reset(self, kind: str = "Counter", args: dict[str, Any] | None = None, **fields: Any) -> Observation:
        """What an environment of class `kind` shows first."""
        self.opened.append(TRLEnvironment(f"{HERE}:{kind}", args=args))
        return self.opened[-1].reset(task(**{"extra": {"target": 3}, **fields}))

    def begun(self, kind: str = "Counter", args: dict[str, Any] | None = None, **fields: Any) -> TRLEnvironment:
        """An environment after its reset."""
        self.reset(kind, args, **fields)
        return self.opened[-1]


@pytest.fixture
def play() -> Iterator[Play]:
    """Where a test makes environments."""
    made = Play()
    yield made
    for environment in made.opened:
        environment.close()


def test_reset_takes_the_row_and_adds_to_the_prompt(play: Play) -> None:
    """The row's columns and its gold answer by name; what it returns goes on the last message."""
    first = play.reset()
    assert shown(first) == [("user", ["Guess.", " Count to 3 (3)."])]


def test_a_reset_that_names_its_arguments_gets_these(play: Play) -> None:
    """Images as PIL images, the way TRL's data sets hold them."""
    images = (picture(4, 3), picture(8, 8))
    first = play.reset("Rows", images=images, extra={"unused": 1})
    assert first.images == images
    assert shown(first)[0][1][-1] == "(4, 3) of 2"


def test_a_row_without_images_has_no_column_of_them(play: Play) -> None:
    """A reset of **kwargs gets all that there is."""
    assert shown(play.begun("NoReward").step(say("", ("row", {}))).observation) == [
        ("tool", ["['answer', 'prompt', 'target']"])
    ]


def test_a_reset_of_any_keywords_gets_the_images(play: Play) -> None:
    """Whatever the parameter that takes them is called."""
    environment = play.begun("Whole", images=(picture(4, 3),))
    assert shown(environment.step(say("", ("row", {}))).observation) == [
        ("tool", ["['answer', 'image', 'images', 'prompt', 'target']"])
    ]


def test_public_methods_are_tools(play: Play) -> None:
    """With the schema of their types and docstrings; reset, get_reward and names with an underscore are none."""
    first = play.reset()
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in first.tools}
    assert set(schemas) == {"increment", "wait", "look", "fail"}
    assert schemas["increment"]["properties"] == {"step": {"type": "integer", "description": "Value to add."}}


def test_tools_are_those_that_trl_finds(play: Play) -> None:
    """Functions of the class, static ones too; properties are not run, and the schemas are transformers' own."""
    first = play.reset("Members")
    schemas = {schema["function"]["name"]: schema for schema in first.tools}
    assert set(schemas) == {"increment", "wait", "look", "fail", "rules"}
    assert schemas["increment"] == get_json_schema(env_trl.Counter.increment)
    assert shown(play.opened[-1].step(say("", ("rules", {}))).observation) == [("tool", ["count"])]


def test_a_row_s_tools_choose_among_the_methods(play: Play) -> None:
    """The policy sees those alone that it can call."""
    first = play.reset(tools=({"type": "function", "function": {"name": "increment"}},))
    assert [schema["function"]["name"] for schema in first.tools] == ["increment"]
    result = play.opened[-1].step(say("", ("increment", {"step": 3}), ("wait", {})))
    told = [text for _, [text] in shown(result.observation)]
    assert told == ["3", "There is no tool 'wait'; the tools are: increment."]


def test_calls_are_made_in_their_order(play: Play) -> None:
    """One after another, as the object has a state; async methods as well."""
    calls = [("increment", {"step": 1}), ("increment", {"step": 10}), ("wait", {}), ("increment", {"step": -8})]
    result = play.begun(args={"start": 2}).step(say("", *calls))
    assert shown(result.observation) == [("tool", [text]) for text in ("3", "13", "waited", "5")]
    assert (result.reward, result.metrics["num_calls"]) == (None, 4.0)


def test_a_tool_s_pictures_keep_their_place(play: Play) -> None:
    """Parts are shown in the order in which the method returned them, to the pixel."""
    result = play.begun(args={"start": 9}).step(say("", ("look", {})))
    assert shown(result.observation) == [("tool", ["PNG (4, 3) (9, 0, 0)", "the counter"])]


def test_a_tool_that_fails_is_told_to_the_policy(play: Play) -> None:
    """And counted; the episode goes on."""
    result = play.begun().step(say("", ("fail", {}), ("increment", {"step": "1"}), ("no_tool", {})))
    told = [text for _, [text] in shown(result.observation)]
    assert "RuntimeError: the counter is stuck" in told[0]
    assert "'1' is not of type 'integer'" in told[1]
    assert "There is no tool 'no_tool'" in told[2]
    assert result.metrics["num_failed_calls"] == 3.0


@pytest.mark.parametrize(("kind", "reward"), [("Counter", 1.0), ("Rows", 0.25), ("NoReward", None)])
def test_get_reward_is_asked_at_the_end(play: Play, kind: str, reward: float | None) -> None:
    """Plain or async; without one the reward service judges the last turn."""
    environment = play.begun(kind, images=(picture(),))
    if kind == "Counter":
        assert environment.step(say("", ("increment", {"step": 3}))).reward is None
    result = environment.step(say("Done."))
    assert (result.observation, result.truncated, result.reward) == (None, False, reward)


def test_calls_of_the_last_turn_are_not_made(play: Play) -> None:
    """The episode ends with the reward of what was done; nothing is added to what tools say."""
    environment = play.begun(max_turns=2)
    first = environment.step(say("", ("increment", {"step": 3})))
    assert shown(first.observation) == [("tool", ["3"])]
    last = environment.step(say("", ("increment", {"step": 3})))
    assert (last.observation, last.truncated, last.reward) == (None, True, 1.0)


def test_what_cannot_be_played_names_class_method_and_value(play: Play) -> None:
    """So that a person finds the line."""
    with pytest.raises(
        EnvironmentFailedError, match=r"env_trl:Untyped\.help is public and so a tool, but .*underscore"
    ):
        play.begun("Untyped")
    with pytest.raises(EnvironmentFailedError, match=r"get_reward of .*env_trl:BadReward returned = nan must be"):
        play.begun("BadReward").step(say("Done."))
    with pytest.raises(ConfigError, match=r'env = "tests.*env_trl:Image" is a module'):
        TRLEnvironment.prepare(f"{HERE}:Image")
    with pytest.raises(ConfigError, match=r'env = "env.py" names no class; write "package.module:Class" or'):
        TRLEnvironment.prepare("env.py")
