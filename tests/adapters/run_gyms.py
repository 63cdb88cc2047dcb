"""The adapters against the real skyrl-gym and reasoning-gym. Not collected by default: `make test-adapters`."""

import importlib
import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from penstock.environments.adapters import ReasoningGymEnvironment, SkyRLEnvironment
from penstock.errors import InvalidRequestError
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.foreign.guide import write_example
from tests.support.foreign.tasks import say, shown, task
from tests.support.worker.hosted_episodes import make_task

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages import warns of itself

REAL_CLASS = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Double(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.max_turns = extras["max_turns"]
        self.truth = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        self.turns += 1
        done = action == self.truth or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": "Again."}]
        reward = float(action == self.truth)
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})
"""


@pytest.fixture(autouse=True)
def _installed() -> None:
    missing = [name for name in ("skyrl_gym", "reasoning_gym") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing} are not installed; make test-adapters fetches them")


def test_a_registered_environment_of_skyrl_gym_plays() -> None:
    """gsm8k_multi_turn by its name: an observation after a wrong answer, then reward, metrics and the end."""
    environment = SkyRLEnvironment("gsm8k_multi_turn")
    asked = task(golds=("72",), max_turns=3)
    assert environment.reset(asked).messages == asked.messages
    first = environment.step(say("It is #### 71"))
    [(role, [text])] = shown(first.observation)
    assert (role, first.metrics) == ("user", {"steps": 1.0})
    assert "#### ANSWER" in text
    last = environment.step(say("It is #### 72"))
    assert (last.observation, last.reward, last.metrics) == (None, 1.0, {"steps": 2.0})
    environment.close()


async def test_a_class_derived_from_theirs_plays_in_a_process(tmp_path: Path) -> None:
    """A file with a subclass of BaseTextEnv, named in a recipe."""
    (tmp_path / "double.py").write_text(REAL_CLASS)
    args = {"env": f"{tmp_path / 'double.py'}:Double", "config": {"max_turns": 2}}
    tables = {"mine": {"class": "penstock.environments.adapters:SkyRLEnvironment", "args": args}}
    async with EnvironmentRegistry(WorkerConfig(environments=tables).environments) as registry:
        environment = registry.find("mine")()
        asked = make_task()
        assert (await environment.reset(asked)).images == asked.images
        assert shown((await environment.step(say("4"))).observation) == [("user", ["Again."])]
        assert (await environment.step(say("3"))).reward == 1.0
        await environment.close()


def entry_of(name: str) -> dict[str, Any]:
    """The first item of a generator, as a row of JSON Lines brings it."""
    item = importlib.import_module("reasoning_gym").create_dataset(name, size=1, seed=42)[0]
    return json.loads(json.dumps(item, default=str))


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "spell_backward", "countdown"])
def test_reasoning_gym_scores_its_items(name: str) -> None:
    """The right answer inside the tag has the full score; none has less, and says that there was none."""
    entry = entry_of(name)
    answer = entry["answer"] if name != "countdown" else entry["metadata"]["expression"]
    scores = []
    for said in (f"I think.<answer>{answer}</answer>", "I do not know."):
        environment = ReasoningGymEnvironment()
        environment.reset(task(extra={"entry": entry}))
        result = environment.step(say(said))
        scores.append((result.observation, result.reward, result.metrics["answered"]))
    assert scores[0] == (None, 1.0, 1.0)
    assert scores[1][1] in (0.0, 0.01)
    assert scores[1][2] == 0.0


def test_a_row_without_an_item_can_never_be_played() -> None:
    """The message names the column and the remedy."""
    with pytest.raises(
        InvalidRequestError, match=r"column entry = None is no item of reasoning-gym .*; write the whole"
    ):
        ReasoningGymEnvironment().reset(task(extra={}))


def test_the_example_for_skyrl_gym_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/rollouts/environments.md has it."""
    monkeypatch.chdir(tmp_path)
    tables = write_example("SkyRL-Gym", tmp_path)["worker"]["environments"]
    environment = SkyRLEnvironment(**tables["guess"]["args"])
    environment.reset(task())
    assert shown(environment.step(say("4")).observation) == [("user", ["Wrong, guess again."])]
    assert environment.step(say("3")).reward == 1.0


def test_the_example_for_reasoning_gym_makes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines hold all that the environment needs."""
    monkeypatch.chdir(tmp_path)
    write_example("reasoning-gym", tmp_path)
    runpy.run_path("script.py")
    rows = [json.loads(line) for line in (tmp_path / "leg_counting.jsonl").read_text().splitlines()]
    assert len(rows) == 1000
    environment = ReasoningGymEnvironment()
    environment.reset(task(golds=(rows[0]["answer"],), extra={"entry": rows[0]["entry"]}))
    assert environment.step(say(f"<answer>{rows[0]['answer']}</answer>")).reward == 1.0
