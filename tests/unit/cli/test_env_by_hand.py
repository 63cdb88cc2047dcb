"""What `penstock env` says that an episode played by hand is worth; without a reward service."""

import asyncio
import contextlib
import io
from typing import Any

import pytest

from penstock.environments import AssistantTurn, EnvironmentFactory, Observation, StepResult, Task
from penstock.records import Message, TextPart, Verdict
from services.cli.environment.by_hand import play
from services.rollout.worker.environments.calculator import Calculator
from services.rollout.worker.environments.single_turn import SingleTurn
from tests.support.worker.tool_calls import task

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 + 6"}}</tool_call>'


class Endless(SingleTurn):
    """Goes on whatever the policy says."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        return StepResult(observation=Observation(messages=(Message(role="user", parts=(TextPart(text="Go on."),)),)))


class Unmoved(SingleTurn):
    """Gives its only step a reward of 0."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        return StepResult(observation=None, reward=0.0)


class Trusting(SingleTurn):
    """Takes the score of any verdict for its reward."""

    async def reset(self, task: Task) -> Observation:
        self._task = task
        return await super().reset(task)

    async def step(self, turn: AssistantTurn) -> StepResult:
        return StepResult(observation=None, reward=(await self._task.grade(turn.text)).score)


class Impatient(Trusting):
    """Does not wait for a verdict, and takes 0 instead."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                return await super().step(turn)
        return StepResult(observation=None, reward=0.0)


@pytest.fixture
def last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Plays `turns`, and returns the last line that the command wrote."""

    def play_turns(factory: EnvironmentFactory, *turns: str, **fields: Any) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{turn}\n.\n" for turn in turns)))
        with asyncio.Runner() as runner:
            assert play(task(**fields), factory, runner, pictures=None) == 0
        return capsys.readouterr().out.splitlines()[-1]

    return play_turns


@pytest.mark.parametrize(
    ("factory", "turns", "max_turns", "ending"),
    [
        (SingleTurn, ["It is 12."], None, "the episode ended"),
        (Calculator, [CALL, "It is 12."], None, "the episode ended"),
        (Calculator, [CALL], 1, "the episode ended (cut short)"),
        (Endless, ["Is it 11?", "It is 12."], 2, "the episode has no further turn (max_turns = 2)"),
    ],
)
@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("OK", "the reward service gives the last turn 1 (OK)"),
        ("TIMEOUT", "the last turn was not judged (TIMEOUT)"),
    ],
)
def test_without_a_reward_the_last_turn_is_graded(
    last_line: Any,
    factory: EnvironmentFactory,
    turns: list[str],
    max_turns: int | None,
    ending: str,
    status: str,
    words: str,
) -> None:
    """As in training, however the episode ends; an unjudged turn is not shown as a 0."""
    graded = list[str]()

    async def grade(text: str) -> Verdict:
        graded.append(text)
        return Verdict(score=1.0, status=status, extracted="12", method="EXACT")

    assert last_line(factory, *turns, max_turns=max_turns, golds=("12",), grade=grade) == f"--- {ending}; {words}"
    assert graded == turns[-1:]


def test_a_step_with_a_reward_decides(last_line: Any) -> None:
    """Nobody is asked, not even where the reward is 0."""
    assert last_line(Unmoved, "It is 12.", golds=("12",)) == "--- the episode ended; reward in all 0"


def test_a_reward_of_an_answer_that_was_not_judged_is_none(last_line: Any) -> None:
    """As in training: the service's limit is not shown as a wrong answer."""

    async def grade(text: str) -> Verdict:
        return Verdict(score=0.0, status="TIMEOUT", extracted="", method="EXACT")

    said = last_line(Trusting, "It is 12.", golds=("12",), grade=grade)
    assert said == "--- the episode ended, unjudged: the reward may rest on an answer that was not (verdict TIMEOUT)"


def test_a_reward_of_an_answer_that_the_environment_did_not_wait_for_is_none(last_line: Any) -> None:
    """As in training, also if the environment takes its own timeout for a wrong answer."""

    async def grade(text: str) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError

    said = last_line(Impatient, "It is 12.", golds=("12",), grade=grade)
    assert said.startswith("--- the episode ended, unjudged: the reward may rest on an answer that was not (the wait")


def test_without_a_gold_answer_the_command_asks_for_one(last_line: Any) -> None:
    """In place of a reward of 0."""
    said = last_line(SingleTurn, "It is 12.")
    assert said == "--- the episode ended; no reward; with --gold ANSWER the reward service judges the last turn"
