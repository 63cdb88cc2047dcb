r"""geo3k_tools with compat="slime" against a table of what slime's own environment did.

tests/data/environments/slime_geo3k.jsonl holds inputs that were made for this test, and the steps that slime's
`Geo3kEnv` (examples/geo3k_vlm_multi_turn at 2a60f00) took on them. Answers are graded here by the reward service's
profile slime_math, there by slime's `math`; they agree on every answer in the table. Where slime raises, which costs it
the sample, its last kind is `raises`; here such a turn is no call, as every other that cannot be read.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.environments import AssistantTurn, Grade, Task
from penstock.records import Message, TextPart, Verdict
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.item import Item
from services.reward.verifier import Verifier
from services.rollout.worker.environments.geo3k_tools import Geo3kTools

TABLE = Path(__file__).parents[3] / "data/environments/slime_geo3k.jsonl"
CASES = [json.loads(line) for line in TABLE.read_text().splitlines()]
RAISES = {"kind": "raises", "done": True, "score": None}
NO_CALL = {"kind": "no_call", "done": True, "score": None}


@pytest.fixture(scope="module")
async def verifier() -> AsyncIterator[Verifier]:
    """What the reward service judges with, without the service."""
    config = RewardConfig(deadline_s=30.0)
    pool = WorkerPool(num_workers=1, memory_limit_bytes=config.memory_limit_mb * 2**20, recycle_after=5000)
    verifier = Verifier(config, pool)
    await pool.start()
    try:
        yield verifier
    finally:
        await verifier.close()
        await pool.close()


def grading(verifier: Verifier, gold: str) -> Grade:
    async def grade(text: str) -> Verdict:
        [scored] = await verifier.verify([Item(golds=[gold], response=text, profile="slime_math")])
        finding = scored.finding
        return Verdict(
            score=scored.score, status=finding.status.value, extracted=finding.extracted, method=finding.method
        )

    return grade


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_it_decides_and_ends_as_slime_does(case: dict[str, Any], verifier: Verifier) -> None:
    """Kind, end and score of every step; nothing of it is a reward, which the last turn's verdict is."""
    environment = Geo3kTools(compat="slime")
    prompt = Message(role="user", parts=(TextPart(text="How long is AB?"),))
    grade = grading(verifier, case["gold"])
    task = Task(id="a", seed=0, messages=(prompt,), golds=(case["gold"],), max_turns=case["max_turns"], grade=grade)
    first = await environment.reset(task)
    assert (first.messages, first.tools) == ((prompt,), ())
    steps = []
    for response in case["responses"]:
        result = await environment.step(AssistantTurn.parse(response))
        done = result.observation is None
        steps.append({"kind": result.kind, "done": done, "score": result.metrics.get("score")})
        assert result.reward is None
        if result.observation is None:
            break
        assert [message.role for message in result.observation.messages] == ["user"]
    assert steps == [NO_CALL if step == RAISES else step for step in case["steps"]]


def test_the_table_has_every_kind_at_every_place() -> None:
    """A table that lost its hard cases would prove little."""
    seen = {(step["kind"], step["done"]) for case in CASES for step in case["steps"]}
    going = {(kind, False) for kind in ("unsupported", "missing_answer", "right", "wrong", "wrong_last_chance")}
    ended = {(kind, True) for kind in ("no_call", "unsupported", "missing_answer", "right", "wrong_last_chance")}
    assert seen == going | ended | {("raises", True)}
    assert len(CASES) >= 150


async def test_a_task_without_a_gold_answer_is_never_right(verifier: Verifier) -> None:
    """As in slime, where the tool then says 0; the reward service, which cannot judge it, is not asked."""
    environment = Geo3kTools(compat="slime")
    await environment.reset(Task(id="a", seed=0, messages=(), golds=("",), grade=grading(verifier, "")))
    call = '<tool_call>{"name": "calc_score", "arguments": {"answer": "12"}}</tool_call>'
    result = await environment.step(AssistantTurn.parse(call))
    assert (result.kind, result.metrics["score"]) == ("wrong", 0.0)
