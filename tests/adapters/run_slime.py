"""SlimeEnvironment over slime's own geo3k environment. Not collected by default: `make test-adapters`, which fetches
slime from GitHub at the commit that tests/data/environments/slime_geo3k.jsonl was recorded from.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.environments import Task
from penstock.errors import EnvironmentFailedError
from penstock.records import Message, TextPart, Verdict
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.worker.hosted_episodes import turn

SLIME = Path(os.environ.get("PENSTOCK_TEST_SLIME", ".clients/slime")).resolve()
FILE = SLIME / "examples/geo3k_vlm_multi_turn/env_geo3k.py"
TABLE = Path(__file__).parents[1] / "data/environments/slime_geo3k.jsonl"
CASES = [json.loads(line) for line in TABLE.read_text().splitlines()]
RAISES = "raises"

pytestmark = [
    pytest.mark.skipif(not FILE.exists(), reason=f"there is no {FILE}; make test-adapters fetches slime"),
    pytest.mark.timeout(600),
]


async def no_grade(text: str) -> Verdict:
    """slime's class grades by itself."""
    raise AssertionError(f"asked to grade {text!r}")


async def play(registry: EnvironmentRegistry, case: dict[str, Any]) -> list[Any]:
    """Whether each step ended the episode, and the tool's score; `RAISES` where the class raises."""
    environment, steps = registry.find("geo3k")(), list[Any]()
    prompt = Message(role="user", parts=(TextPart(text="How long is AB?"),))
    task = Task(
        id="a", seed=0, messages=(prompt,), golds=(case["gold"],), max_turns=case["max_turns"], grade=no_grade
    )  # fmt: skip
    try:
        assert (await environment.reset(task)).messages == (prompt,)
        for response in case["responses"]:
            try:
                result = await environment.step(turn(response))
            except EnvironmentFailedError as error:
                return [*steps, RAISES if "(env_geo3k.py, line" in str(error) else str(error)]
            steps.append((result.observation is None, result.metrics.get("score")))
            assert result.reward is None
            if result.observation is None:
                break
    finally:
        await environment.close()
    return steps


async def test_slimes_own_environment_plays_as_it_does_in_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file as it is, with slime's checkout on the path, each episode in a process of its own: it ends where it
    ended, with the scores that it gave."""
    monkeypatch.syspath_prepend(str(SLIME))
    table = {"class": "penstock.environments.adapters:SlimeEnvironment", "args": {"env": str(FILE)}}
    wrong = {}
    async with EnvironmentRegistry(WorkerConfig(environments={"geo3k": table}).environments) as registry:
        for case in CASES:
            steps = await play(registry, case)
            wanted = [RAISES if each["kind"] == RAISES else (each["done"], each["score"]) for each in case["steps"]]
            if steps != wanted:
                wrong[case["id"]] = (steps, wanted)
    assert wrong == {}
