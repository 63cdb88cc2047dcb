"""Lines of `penstock env` that are wrong, and those that are nearly; and how they are played."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.environments import AssistantTurn, Grade, Observation, StepResult, Task
from penstock.errors import DataError, PenstockError
from penstock.records import Message, TextPart, Verdict
from services.cli.environment.grading import Grading
from services.cli.environment.lines import Script, parse, play

GOOD: dict[str, Any] = {"id": "a", "gold": "12", "max_turns": 3, "responses": ["one", "two"]}


def read(row: object, **settings: Any) -> Script:
    text = row if isinstance(row, str) else json.dumps(row)
    return parse(text.encode(), is_first=True, **{"profile": "math", "max_turns": None, **settings})


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{oops\n", ("not JSON", "write one JSON object per line")),
        ("[1]\n", ("[1] is not a JSON object", '"responses"')),
        ({key: value for key, value in GOOD.items() if key != "id"}, ('"id" is missing',)),
        ({**GOOD, "id": None}, ('"id" = null', "write it as a string")),
        ({key: value for key, value in GOOD.items() if key != "gold"}, ('"gold" is missing', "give the gold answer")),
        ({**GOOD, "gold": 12}, ('"gold" = 12', "quote the answer")),
        ({**GOOD, "max_turns": 0}, ('"max_turns" = 0', "give an integer >= 1")),
        ({**GOOD, "max_turns": "3"}, ('"max_turns" = "3"', "give an integer >= 1")),
        ({**GOOD, "max_turns": True}, ('"max_turns" = true', "give an integer >= 1")),
        (
            {key: value for key, value in GOOD.items() if key != "responses"},
            ('"responses" is missing', "a list of strings"),
        ),
        ({**GOOD, "responses": "one"}, ('"responses" = ', "a list of strings")),
        ({**GOOD, "responses": ["one", 5]}, ('"responses" = 5', "is not a string")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_fault_is_told_by_field_value_and_remedy(bad: object, words: tuple[str, ...]) -> None:
    """The command adds the line's number."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        read(bad)


def test_what_a_line_leaves_out_is_as_the_command_says() -> None:
    """The limit of turns, and the profile; a blank question; none of several gold answers is lost."""
    script = read({"id": 7, "gold": ["12", "12 cm"], "responses": []}, profile="geo3k", max_turns=5)
    assert (script.id, script.max_turns, script.responses) == (7, 5, ())
    assert (script.subject.profile, script.subject.golds) == ("geo3k", ("12", "12 cm"))
    script = read({**GOOD, "profile": "mcq"}, profile="geo3k", max_turns=5)
    assert (script.max_turns, script.subject.profile, script.responses) == (3, "mcq", ("one", "two"))


class Endless:
    """Goes on whatever the policy says; "slow" is never answered, "fail" is an error of its own, "grade" is graded."""

    async def reset(self, task: Task) -> Observation:
        self._task = task
        return Observation(messages=task.messages)

    async def step(self, turn: AssistantTurn) -> StepResult:
        if turn.text == "slow":
            await asyncio.Event().wait()
        if turn.text == "fail":
            raise TimeoutError("the board does not answer")
        if turn.text == "grade":
            return StepResult(observation=None, reward=(await self._task.grade(turn.text)).score)
        return StepResult(observation=Observation(messages=(Message(role="user", parts=(TextPart(text="Go on."),)),)))

    async def close(self) -> None: ...


class Overtaxed(Grading):
    """Has no time to judge."""

    def grade(self, golds: Sequence[str], profile: str) -> Grade:
        async def grade(text: str) -> Verdict:
            return Verdict(score=0.0, status="TIMEOUT", extracted="", method="EXACT")

        return grade


def play_line(folder: Path, *, timeout_s: float = 600.0, **fields: Any) -> None:
    """Play one line with `Endless`, whose answers nobody judges."""
    file = folder / "turns.jsonl"
    file.write_text(json.dumps({**GOOD, **fields}))

    def no_service() -> Any:
        raise AssertionError

    with asyncio.Runner() as runner:
        play(file, Endless, Overtaxed(no_service), runner, profile="math", max_turns=None, timeout_s=timeout_s)


@pytest.mark.parametrize(("max_turns", "num_played"), [(2, 2), (5, 3), (None, 3)])
def test_no_turn_is_played_behind_the_limit(
    max_turns: int | None, num_played: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in training, even if the environment would go on."""
    play_line(tmp_path, max_turns=max_turns, responses=["one", "two", "three"])
    assert [step["done"] for step in json.loads(capfd.readouterr().out)["steps"]] == [False] * num_played


def test_an_environment_that_takes_too_long_ends_it_with_line_limit_and_remedy(tmp_path: Path) -> None:
    """The limit is the worker's."""
    with pytest.raises(DataError, match=r"turns\.jsonl:1: the environment took longer than 0\.01 s; raise --worker\."):
        play_line(tmp_path, timeout_s=0.01, responses=["slow"])


def test_an_environments_own_time_out_is_told_as_its_error(tmp_path: Path) -> None:
    """It is not the limit of the line, which a person would raise in vain."""
    with pytest.raises(TimeoutError, match="the board does not answer"):
        play_line(tmp_path, responses=["fail"])


def test_a_reward_of_an_answer_that_was_not_judged_is_no_score(tmp_path: Path) -> None:
    """As in training, where it leaves the sample unjudged."""
    with pytest.raises(PenstockError, match=r"turns\.jsonl:1: a reward may rest on an answer that was not judged"):
        play_line(tmp_path, responses=["grade"])
