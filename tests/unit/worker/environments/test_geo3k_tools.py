"""geo3k_tools: what it answers, when it ends, and what an episode earns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.errors import ConfigError, PenstockError
from penstock.records import ImagePart, Message, TextPart, Verdict
from services.rollout.worker.environments.geo3k_tools import SCHEMA, Geo3kTools
from services.rollout.worker.environments.registry import EnvironmentRegistry

QUESTION = Message(role="user", parts=(ImagePart(index=0), TextPart(text="How long is AB?")))


class Grader:
    """Judges as a reward service does whose gold answer is 12, and keeps what it was asked."""

    def __init__(self, scores: Mapping[str, float] | None = None, status: str = "OK") -> None:
        self.asked: list[str] = []
        self._scores = scores or {r"\boxed{12}": 1.0}
        self._status = status

    async def __call__(self, text: str) -> Verdict:
        """1 for a text with the answer in a box."""
        self.asked.append(text)
        score = max((score for part, score in self._scores.items() if part in text), default=0.0)
        return Verdict(score=score, status=self._status, extracted="", method="EXACT")


def call(answer: Any = "12", name: str = "calc_score", key: str = "answer") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {key: answer}})}</tool_call>"


RIGHT, WRONG = call("12"), call("7")
FINAL, WRONG_FINAL = r"So it is \boxed{12}.", r"So it is \boxed{7}."
UNKNOWN, MISSING, MALFORMED = call(name="zoom"), call(" "), "<tool_call>calc_score(12)</tool_call>"


def make_task(grader: Grader, messages: Sequence[Message] = (QUESTION,), **fields: Any) -> Task:
    return Task(id="a", seed=0, messages=tuple(messages), images=(b"picture",), golds=("12",), grade=grader, **fields)


async def play(
    turns: Sequence[str], environment: Geo3kTools | None = None, grader: Grader | None = None, **fields: Any
) -> list[StepResult]:
    """Results of `turns`, up to the end of the episode."""
    environment = environment or Geo3kTools()
    await environment.reset(make_task(grader or Grader(), **fields))
    results: list[StepResult] = []
    for text in turns:
        results.append(await environment.step(AssistantTurn.parse(text)))
        if results[-1].observation is None:
            break
    await environment.close()
    return results


def said(result: StepResult) -> str:
    assert result.observation is not None
    [message] = result.observation.messages
    [part] = message.parts
    assert isinstance(part, TextPart)
    return part.text


def measured(results: Sequence[StepResult]) -> dict[str, float]:
    """The episode's metrics: of each the last value, as samples keep it."""
    return {name: value for result in results for name, value in result.metrics.items()}


@pytest.mark.parametrize(
    ("turns", "kinds", "rewards"),
    [
        ([FINAL], ["no_call"], [1.0]),
        ([WRONG_FINAL], ["no_call"], [0.0]),
        ([RIGHT, FINAL], ["right"], [1.0]),
        ([WRONG, RIGHT], ["wrong", "right"], [0.0, 0.5]),
        ([WRONG, FINAL], ["wrong", "no_call"], [0.0, 0.5]),
        ([WRONG, WRONG, RIGHT], ["wrong", "wrong_last_chance", "right"], [0.0, 0.0, 0.25]),
        ([WRONG, WRONG, FINAL], ["wrong", "wrong_last_chance", "no_call"], [0.0, 0.0, 0.25]),
        ([WRONG, WRONG, WRONG, FINAL], ["wrong", "wrong_last_chance", "wrong_last_chance"], [0.0, 0.0, 0.0]),
        ([WRONG, WRONG_FINAL], ["wrong", "no_call"], [0.0, 0.0]),
        ([UNKNOWN, MISSING, FINAL], ["unsupported", "missing_answer", "no_call"], [None, None, 1.0]),
        ([MALFORMED, RIGHT], ["malformed", "right"], [None, 1.0]),
        ([UNKNOWN, WRONG, RIGHT], ["unsupported", "wrong_last_chance", "right"], [None, 0.0, 0.5]),
    ],
    ids=lambda value: None,
)
async def test_an_episode_earns_its_answer_less_a_half_for_each_wrong_check(
    turns: list[str], kinds: list[str], rewards: list[float | None]
) -> None:
    """It ends at the first right answer, at a turn without a call, and at the third turn."""
    results = await play(turns)
    assert [result.kind for result in results] == kinds
    assert [result.reward for result in results] == rewards
    assert results[-1].observation is None
    assert not results[-1].truncated


@pytest.mark.parametrize("fault", [UNKNOWN, MISSING, MALFORMED])
async def test_what_cannot_be_run_in_the_last_turn_is_graded_as_it_stands(fault: str) -> None:
    """A wrong form does not cost the answer beside it, and earns nothing by itself."""
    results = await play([WRONG, WRONG, fault + FINAL])
    assert (results[-1].observation, results[-1].reward) == (None, 0.25)
    assert (await play([WRONG, WRONG, fault]))[-1].reward == 0.0


async def test_only_the_policys_own_text_is_graded() -> None:
    """A check asks with the answer in a box, a final turn with its own text: no feedback, no earlier turn."""
    grader = Grader()
    await play([WRONG, call(r"\boxed{8} cm"), FINAL], grader=grader)
    assert grader.asked == [r"\boxed{7}", r"\boxed{8} cm", FINAL]


@pytest.mark.parametrize("turns", [[RIGHT], [FINAL]])
async def test_an_answer_that_was_not_judged_is_never_a_zero(turns: list[str]) -> None:
    """It raises, so that the sample ends unjudged."""
    with pytest.raises(PenstockError, match=r"did not judge .*12.*status TIMEOUT; .*reward.deadline_s"):
        await play(turns, grader=Grader(status="TIMEOUT"))


async def test_first_attempts_checks_and_tool_use_are_metrics() -> None:
    """So far, with each step; the first attempt is a check or a final answer, and is told once."""
    expected = {
        (FINAL,): (1, 0, 0),
        (WRONG_FINAL,): (0, 0, 0),
        (RIGHT,): (1, 1, 1),
        (WRONG, RIGHT): (0, 2, 1),
        (WRONG, WRONG, FINAL): (0, 2, 1),
        (UNKNOWN, RIGHT): (1, 1, 1),
        (UNKNOWN, FINAL): (1, 0, 1),
    }
    for turns, numbers in expected.items():
        results = await play(turns)
        found = measured(results)
        assert (found["first_attempt_accuracy"], found["num_checks"], found["tool_use"]) == numbers, turns
        assert found["score"] == results[-1].metrics["score"]
        assert sum("first_attempt_accuracy" in result.metrics for result in results) == 1


@pytest.mark.parametrize(("answer", "kind"), [(12, "right"), (12.5, "wrong"), (" 12 ", "right"), ("x", "wrong")])
async def test_an_answer_is_a_text_or_a_number(answer: Any, kind: str) -> None:
    """Models write both."""
    assert (await play([call(answer)]))[0].kind == kind


@pytest.mark.parametrize("answer", [None, "", "\n", True, ["12"], {"value": 12}])
async def test_anything_else_is_no_answer(answer: Any) -> None:
    """It is told, and costs no check."""
    [result] = await play([call(answer)])
    assert (result.kind, result.metrics["num_checks"], result.reward) == ("missing_answer", 0.0, None)
    assert "argument `answer`" in said(result)


async def test_one_check_a_turn_which_is_the_last_call() -> None:
    """However many calls there are."""
    assert [result.kind for result in await play([RIGHT + RIGHT + WRONG, WRONG + RIGHT])] == ["wrong", "right"]
    grader = Grader()
    await play([WRONG * 5], grader=grader)
    assert len(grader.asked) == 1


@pytest.mark.parametrize("name", ["calc_score", "calc_geo3k_reward"])
async def test_both_names_of_the_tool_are_known(name: str) -> None:
    """slime's prompts use one, verl's the other."""
    assert (await play([call(name=name)]))[0].kind == "right"


async def test_feedback_tells_what_to_mend_and_when_the_last_turn_comes() -> None:
    """Before the last turn only; and never what the answer is."""
    first, second, _ = await play([WRONG, WRONG, WRONG])
    assert said(first).startswith("Wrong.")
    assert "your last" not in said(first)
    assert r"The next turn is your last: give the final answer in \boxed{}." in said(second)
    for fault, word in ((UNKNOWN, "calc_score"), (MISSING, "`answer`"), (MALFORMED, "one JSON object")):
        early, late = (await play([fault, fault, WRONG]))[:2]
        assert word in said(early)
        assert "your last" not in said(early)
        assert "your last" in said(late)


async def test_the_tasks_limit_of_turns_goes_before_the_environments() -> None:
    """3 by default."""
    assert len(await play([WRONG] * 9)) == 3
    assert len(await play([WRONG] * 9, Geo3kTools(max_turns=5))) == 5
    assert len(await play([WRONG] * 9, Geo3kTools(max_turns=5), max_turns=2)) == 2
    assert len(await play([WRONG] * 9, max_turns=1)) == 1


async def test_the_discount_is_a_choice() -> None:
    """1 makes wrong checks free, 0 makes a right answer worth nothing after one."""
    assert (await play([WRONG, RIGHT], Geo3kTools(discount=1.0)))[-1].reward == 1.0
    assert (await play([WRONG, RIGHT], Geo3kTools(discount=0.0)))[-1].reward == 0.0


async def test_a_profile_may_have_another_scale() -> None:
    """A wrong answer that ends the episode earns the profile's lowest score, one before it nothing."""
    scores = {"boxed": -1.0, r"\boxed{12}": 0.9}
    assert [result.reward for result in await play([WRONG, RIGHT], grader=Grader(scores))] == [0.0, 0.45]
    assert [result.reward for result in await play([WRONG, WRONG_FINAL], grader=Grader(scores))] == [0.0, -1.0]
    strict = Geo3kTools(right_from=1.0)
    assert [result.kind for result in await play([RIGHT], strict, grader=Grader(scores))] == ["wrong"]


async def first_of(environment: Geo3kTools, messages: Sequence[Message] = (QUESTION,), **fields: Any) -> Observation:
    return await environment.reset(make_task(Grader(), messages, **fields))


async def test_the_rows_prompt_stays_and_the_template_shows_the_tool() -> None:
    """Feedback is then a tool's reply."""
    environment = Geo3kTools()
    first = await first_of(environment)
    assert first == Observation(messages=(QUESTION,), images=(b"picture",), tools=(SCHEMA,))
    result = await environment.step(AssistantTurn.parse(WRONG))
    assert result.observation is not None
    assert [message.role for message in result.observation.messages] == ["tool"]


async def test_a_row_may_bring_its_own_schema_of_the_tool() -> None:
    """Others that it brings are not shown: nobody would run them."""
    own = {"type": "function", "function": {"name": "calc_geo3k_reward", "parameters": {"type": "object"}}}
    other = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    assert (await first_of(Geo3kTools(), tools=(other, own))).tools == (own,)
    assert (await first_of(Geo3kTools(), tools=(other,))).tools == (SCHEMA,)


async def test_for_a_template_without_tools_words_explain_them() -> None:
    """No schema; feedback is a user's message, and shows the form of a call to who got it wrong."""
    environment = Geo3kTools(show_tools=False)
    assert (await first_of(environment)).tools == ()
    for text, shows in ((MALFORMED, True), (WRONG, False)):
        result = await environment.step(AssistantTurn.parse(text))
        assert result.observation is not None
        assert result.observation.messages[0].role == "user"
        assert ("<tool_call>" in said(result)) is shows


def texts(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


@pytest.mark.parametrize("show_tools", [True, False])
async def test_a_suffix_explains_the_tool_behind_the_question(show_tools: bool) -> None:
    """With the form of a call where the template does not show it, and the number of turns."""
    environment = Geo3kTools(instruction="suffix", show_tools=show_tools)
    [message] = (await first_of(environment, max_turns=4)).messages
    assert message.parts[:2] == QUESTION.parts
    assert "You have 4 turns" in texts(message)
    assert ("<tool_call>" in texts(message)) is not show_tools


async def test_a_system_instruction_never_makes_a_second_system_message() -> None:
    """Templates drop a second one, or refuse it."""
    added = (await first_of(Geo3kTools(instruction="system"))).messages
    assert [message.role for message in added] == ["system", "user"]
    system = Message(role="system", parts=(TextPart(text="Be brief."),))
    joined = (await first_of(Geo3kTools(instruction="system"), [system, QUESTION])).messages
    assert [message.role for message in joined] == ["system", "user"]
    assert texts(joined[0]).startswith("Be brief.")
    assert "calc_score" in texts(joined[0])
    with pytest.raises(PenstockError, match=r'no user message .* use "system"'):
        await first_of(Geo3kTools(instruction="suffix"), [system, Message(role="assistant", parts=QUESTION.parts)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_turns": 0}, "max_turns = 0"),
        ({"discount": 1.5}, "discount = 1.5 must be between 0 and 1"),
        ({"discount": float("nan")}, "discount = nan"),
        ({"instruction": "prefix"}, "instruction = 'prefix'"),
        ({"compat": "verl"}, "compat = 'verl' must be \"slime\""),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    """By name, value and remedy."""
    with pytest.raises(ConfigError, match=words):
        Geo3kTools(**settings)


def test_prompts_find_it_by_name() -> None:
    """It comes with Penstock."""
    assert EnvironmentRegistry().find("geo3k_tools") is Geo3kTools
