"""A `build_env` file of slime's users is an environment."""

from pathlib import Path
from typing import Any

import pytest

from penstock.environments.adapters import SlimeEnvironment
from penstock.errors import ConfigError, EnvironmentFailedError
from tests.support.foreign import env_slime
from tests.support.foreign.tasks import say, shown, task
from tests.support.worker.scripted_episodes import picture

FILE = env_slime.__file__


def begun(env: str = FILE, **fields: Any) -> SlimeEnvironment:
    """An environment after its reset."""
    environment = SlimeEnvironment(env, config={"max_turns": 3, "size": 7})
    environment.reset(task(**fields))
    return environment


def test_the_policy_sees_the_row_first() -> None:
    """As in slime, the question is in the prompt; nothing is added, and the row's tools are shown."""
    images, tools = (picture(),), ({"type": "function"},)
    asked = task(images=images, tools=tools)
    first = SlimeEnvironment(FILE, config={"size": 7}).reset(asked)
    assert (first.messages, first.images, first.tools) == (asked.messages, images, tools)


def test_an_observation_is_what_format_observation_makes_of_it() -> None:
    """Its role, its parts in their order, and its pictures to the pixel."""
    result = begun().step(say("4"))
    assert shown(result.observation) == [("user", ["PNG (4, 3) (255, 1, 0)", "Wrong."])]
    assert (result.reward, result.truncated) == (None, False)


def test_numbers_of_info_are_metrics() -> None:
    """Truth values too; texts and what is not finite are none."""
    assert begun().step(say("4")).metrics == {"score": 0.0, "tool_executed": 1.0}


def test_done_ends_the_episode() -> None:
    """Without the last observation; `truncated` of info says whether it was cut short."""
    right = begun().step(say("3"))
    assert (right.observation, right.truncated, right.metrics["score"]) == (None, False, 1.0)
    cut = begun(max_turns=1).step(say("4"))
    assert (cut.observation, cut.truncated) == (None, True)


@pytest.mark.parametrize(
    ("extra", "metadata"),
    [({"level": 2}, {"level": 2}), ({"level": 2, "metadata": {"tools": []}}, {"tools": []})],
)
def test_build_env_sees_the_row_and_the_custom_config(extra: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Label, metadata and turns; `metadata` is the column of that name, or else all others."""
    result = begun(extra=extra, max_turns=5).step(say("sample"))
    assert shown(result.observation) == [("user", [f"run/0/0/e/0 3 {metadata} 7 5"])]


def test_the_custom_config_limits_turns_where_the_data_do_not() -> None:
    """slime has the number there."""
    assert shown(begun().step(say("sample")).observation)[0][1][0].endswith(" 7 3")


@pytest.mark.parametrize(("fields", "max_turns"), [({}, 3), ({"max_turns": 2}, 2)])
def test_the_limit_ends_an_episode_whose_environment_goes_on(fields: dict[str, Any], max_turns: int) -> None:
    """slime's loop counts the turns, so a class need not. The data's limit precedes the custom config's."""
    environment = begun(**fields)
    results = [environment.step(say("sample")) for _ in range(max_turns)]
    assert [result.observation is None for result in results] == [False] * (max_turns - 1) + [True]
    assert [result.truncated for result in results] == [False] * (max_turns - 1) + [True]


@pytest.mark.parametrize("max_turns", [0, "3", True])
def test_a_limit_that_is_no_number_of_turns_is_a_mistake_in_the_recipe(max_turns: Any) -> None:
    """The message has the value and the remedy."""
    with pytest.raises(ConfigError, match=rf"config\.max_turns = {max_turns!r} .*give an integer >= 1"):
        SlimeEnvironment.prepare(FILE, config={"max_turns": max_turns})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("build_env = 3", "has no build_env; define build_env"),
        (
            "import no_such_slime",
            r"ModuleNotFoundError: .*install no_such_slime where workers run, or put .*PYTHONPATH",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_is_no_environment_is_a_mistake_in_the_recipe(tmp_path: Path, source: str, reason: str) -> None:
    """The message has the file and the remedy."""
    file = tmp_path / "env_mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=f"(?s)env_mine.py.*{reason}"):
        SlimeEnvironment.prepare(str(file))


def test_a_file_that_is_not_there_is_a_mistake_in_the_recipe() -> None:
    """The message says where it was looked for."""
    with pytest.raises(ConfigError, match=r'env = "no/env.py": there is no file /.*/no/env.py; relative paths begin'):
        SlimeEnvironment.prepare("no/env.py")


def test_a_module_serves_as_a_file_does() -> None:
    """As slime's switch takes both."""
    assert begun(env_slime.__name__).step(say("3")).observation is None


def test_a_file_finds_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside it are modules for it."""
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "neighbour_of_env.py").write_text("def build_env(sample, args): ...\n")
    (tmp_path / "env_two.py").write_text("from neighbour_of_env import build_env\n")
    SlimeEnvironment.prepare(str(tmp_path / "env_two.py"))


def test_answers_that_cannot_be_played_name_class_method_and_value(tmp_path: Path) -> None:
    """So that a person finds the line."""
    with pytest.raises(
        EnvironmentFailedError, match=r"GuessEnv\.step of .*env_slime\.py returned None; it must return"
    ):
        begun().step(say("none"))
    (tmp_path / "env_empty.py").write_text("def build_env(*given): return object()\n")
    with pytest.raises(EnvironmentFailedError, match=r"returned object, which has no reset, step, format_observation;"):
        begun(str(tmp_path / "env_empty.py"))


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("row, settings", "row, settings"),
        ("*row_and_settings", "*row_and_settings"),
        ("sample=None, **_", "sample, _['args']"),
        ("**row_and_settings", "**row_and_settings"),
    ],
)
def test_build_env_is_called_as_slime_calls_it(tmp_path: Path, parameters: str, given: str) -> None:
    """By keyword wherever its parameters allow it, else by position: it may name its arguments otherwise."""
    (tmp_path / "env_other.py").write_text(
        f"from tests.support.foreign.env_slime import build_env as make\ndef build_env({parameters}):\n"
        f"    return make({given})\n"
    )
    environment = begun(str(tmp_path / "env_other.py"))
    assert environment.step(say("3")).observation is None
    environment.close()
