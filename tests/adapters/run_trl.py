"""TRLEnvironment beside the real GRPOTrainer: the same class, row and turns. Not collected by default: `make
test-adapters`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.environments import Observation
from penstock.environments.adapters import TRLEnvironment
from tests.support.foreign import env_trl
from tests.support.foreign.guide import write_example
from tests.support.foreign.tasks import say, shown, task

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("PENSTOCK_TEST_CLIENTS", ".clients")).resolve() / "trl/bin/python"

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-adapters fetches TRL"),
    pytest.mark.timeout(600),
]


def call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A call that the policy makes."""
    return name, arguments


def written(turn: str | list[tuple[str, dict[str, Any]]]) -> str:
    """A turn as the policy writes it."""
    if isinstance(turn, str):
        return turn
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in turn]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)


def play_in_trl(file: Path, kind: str, row: dict[str, Any], samples: list[Any], folder: Path) -> dict[str, Any]:
    """Play a group in TRL; see trl_episodes.py."""
    answer = folder / "answer.json"
    given = {
        "file": str(file),
        "class": kind,
        "model": str(ROOT / "models" / "tiny-qwen3-vl"),
        "row": {"prompt": [{"role": "user", "content": "Guess."}], **row},
        "said": [[written(turn) for turn in turns] for turns in samples],
        "answer": str(answer),
    }
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("trl_episodes.py"))],
        input=json.dumps(given), env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())


def play_here(file: str, row: dict[str, Any], turns: list[Any]) -> tuple[Observation, list[Any], float | None]:
    """Play one sample through the adapter: what it shows first, what it answers to each turn, and the reward."""
    environment = TRLEnvironment(file)
    answer = {"golds": (row["answer"],)} if "answer" in row else {}
    extra = {name: value for name, value in row.items() if name != "answer"}
    first, answers, reward = environment.reset(task(extra=extra, **answer)), [], None
    for turn in turns:
        result = environment.step(say(turn) if isinstance(turn, str) else say("", *turn))
        answers.append([] if result.observation is None else joined(result.observation))
        reward = result.reward
    environment.close()
    return first, answers, reward


def joined(observation: Observation) -> list[list[Any]]:
    """Role and parts of each message, as trl_episodes.py writes them."""
    return [[role, [part.replace("PNG", "picture") for part in parts]] for role, parts in shown(observation)]


def text_of(messages: list[list[Any]]) -> str:
    """All texts as one: TRL joins what reset adds to the prompt, here it is a part of its own."""
    return "".join(part for _, parts in messages for part in parts)


def assert_plays_alike(theirs: dict[str, Any], file: str, row: dict[str, Any], samples: list[Any]) -> None:
    """Prompt, tools, the tools' answers and rewards of each sample are TRL's."""
    assert theirs["num_steps"] == 1
    for turns, sample in zip(samples, theirs["samples"], strict=True):
        first, answers, reward = play_here(file, row, turns)
        assert text_of(joined(first)) == text_of(sample["prompt"])
        assert list(first.tools) == theirs["tools"]
        tools = [message for message in sample["completion"] if message[0] == "tool"]
        assert [message for answer in answers for message in answer] == tools
        assert reward == sample["reward"]


def test_a_class_plays_as_in_trl(tmp_path: Path) -> None:
    """Tools with a state, async ones, pictures in order; one sample reaches its target, the other does not."""
    row = {"target": 3, "answer": "3"}
    samples = [
        [[call("increment", step=1), call("increment", step=1)], [call("wait")], [call("look")],
         [call("increment", step=1)], "Done."],
        [[call("increment", step=5)], "Done."],
    ]  # fmt: skip
    theirs = play_in_trl(Path(env_trl.__file__), "Counter", row, samples, tmp_path)
    assert [sample["reward"] for sample in theirs["samples"]] == [1.0, 0.0]
    assert_plays_alike(theirs, f"{env_trl.__name__}:Counter", row, samples)


def test_the_example_of_the_guide_plays_as_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/rollouts/environments.md has it."""
    monkeypatch.chdir(tmp_path)
    write_example("TRL", tmp_path)
    row, samples = {"answer": "3"}, [[[call("add", number=3)], "Done."], [[call("add", number=1)], "Done."]]
    theirs = play_in_trl(tmp_path / "env_count.py", "Count", row, samples, tmp_path)
    assert_plays_alike(theirs, "env_count.py:Count", row, samples)
