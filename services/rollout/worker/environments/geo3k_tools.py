r"""Geometry with a tool that checks answers: the environment of slime's multi-turn geo3k example, without its leak.

The tool knows the gold answer, so a policy could guess until it says "right". Hence one check per turn, few turns, the
first right answer ends the episode, and each wrong check lowers what a later right answer earns. The reward service
gives every verdict, on text that the policy wrote; feedback is never graded. An answer that was not judged raises: the
sample ends unjudged, never with a wrong 0.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.errors import ConfigError, PenstockError
from penstock.records import Message, TextPart, Verdict
from services.rollout.worker.environments.built_in import BuiltIn
from services.rollout.worker.environments.check_call import TOOL_NAMES, read_call, read_call_as_slime

Instruction: TypeAlias = Literal["none", "suffix", "system"]

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAMES[0],
        "description": "Tells whether an answer to the problem is right. One check per turn.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer to check, a number or LaTeX."}},
            "required": ["answer"],
        },
    },
}
"""The checking tool, in OpenAI's form."""

_EXAMPLE = '<tool_call>{"name": "calc_score", "arguments": {"answer": "12"}}</tool_call>'
_FINISH = r"give the final answer in \boxed{}"


class Geo3kTools(BuiltIn):
    """Geometry with a tool that checks answers: each of a few turns is a check or the final answer."""

    def __init__(
        self,
        *,
        max_turns: int = 3,
        discount: float = 0.5,
        right_from: float = 0.5,
        show_tools: bool = True,
        instruction: Instruction = "none",
        compat: Literal["slime"] | None = None,
    ) -> None:
        """Make the environment of one episode.

        Args:
            max_turns: Turns of an episode whose task sets no limit.
            discount: A right answer after n wrong checks earns its score times discount to the power n. 0.5 is the
                largest value at which all later answers together never earn more than the first.
            right_from: Minimum score of a verdict that says "right".
            show_tools: Show the tool's schema through the chat template. False for a template without tools, with the
                call's form in the data or the instruction; feedback is then a user's message.
            instruction: Where to explain the tool in rows that do not: after the user's text, or in the system message.
            compat: "slime": decide and end as slime's environment does. A right check does not end the episode, an
                unreadable call ends it, no tools are shown, and the reward service judges the last turn.

        Raises:
            ConfigError: a value is out of range.
        """
        if max_turns < 1:
            raise ConfigError(f"max_turns = {max_turns} must be at least 1")
        if not 0 <= discount <= 1:
            raise ConfigError(f"discount = {discount} must be between 0 and 1")
        if instruction not in ("none", "suffix", "system"):
            raise ConfigError(f'instruction = {instruction!r} must be "none", "suffix" or "system"')
        if compat not in (None, "slime"):
            raise ConfigError(f'compat = {compat!r} must be "slime", or left out')
        self._max_turns = max_turns
        self._discount = discount
        self._right_from = right_from
        self._is_slime = compat == "slime"
        self._show_tools = show_tools and not self._is_slime
        self._instruction = instruction
        self._num_turns = 0
        self._num_checks = 0
        self._num_wrong = 0
        self._has_called = False
        self._has_attempted = False

    async def reset(self, task: Task) -> Observation:
        """Return the row's own conversation, with the tool; the row's own schema of the tool replaces ours."""
        self._task = task
        self._max_turns = task.max_turns or self._max_turns
        own = tuple(tool for tool in task.tools if tool.get("function", {}).get("name") in TOOL_NAMES)
        return Observation(
            messages=self._instructed(task.messages),
            images=task.images,
            tools=(own or (SCHEMA,)) if self._show_tools else (),
        )

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Check the answer of the turn's call; a turn without a call, or the last, is the final answer.

        Raises:
            PenstockError: the reward service did not judge the answer.
        """
        self._num_turns += 1
        call = read_call_as_slime(turn.text) if self._is_slime else read_call(turn)
        self._has_called = self._has_called or call.kind != "no_call"
        if call.kind == "check":
            return await self._check(call.answer)
        if call.kind == "no_call" or self._is_last:
            return await self._finish(turn, call.kind)
        remedy = f"Call it as {_EXAMPLE}" if not self._show_tools else "Call it as shown to you"
        fault = {
            "malformed": f"The call cannot be read. {remedy}, with one JSON object.",
            "unsupported": f"There is no tool of this name; the only one is {TOOL_NAMES[0]}. {remedy}.",
            "missing_answer": f"The call has no answer to check. {remedy}, with the argument `answer`.",
        }[call.kind]
        return self._go_on(fault + self._last_chance, call.kind)

    async def close(self) -> None:
        """Do nothing: no resource is held."""

    @property
    def _is_last(self) -> bool:
        return self._num_turns >= self._max_turns

    @property
    def _last_chance(self) -> str:
        return f" The next turn is your last: {_FINISH}." if self._num_turns == self._max_turns - 1 else ""

    async def _check(self, answer: str) -> StepResult:
        if self._is_slime and not any(self._task.golds):
            score = 0.0
        else:
            verdict = await self._grade(answer if r"\boxed" in answer else rf"\boxed{{{answer}}}")
            score = verdict.score
        is_right = score >= self._right_from
        warns = not is_right and self._num_turns >= self._max_turns - 1
        kind = "right" if is_right else "wrong_last_chance" if warns else "wrong"
        reward = None if self._is_slime else self._reward(score, is_right) if is_right or self._is_last else 0.0
        self._num_checks += 1
        self._num_wrong += not is_right
        if self._is_last or (is_right and not self._is_slime):
            return self._end(kind, reward=reward, score=score)
        if is_right:
            return self._go_on(f"Right. Stop here and {_FINISH}.", kind, score=score)
        said = "Wrong. Look for the mistake in your reasoning; another way may help." + self._last_chance
        return self._go_on(said, kind, score=score, reward=reward)

    async def _finish(self, turn: AssistantTurn, kind: str) -> StepResult:
        """End with a turn that checked nothing; its text is the answer."""
        if self._is_slime:
            return self._end(kind)
        verdict = await self._grade(turn.text)
        is_right = verdict.score >= self._right_from
        return self._end(kind, reward=self._reward(verdict.score, is_right), score=verdict.score)

    async def _grade(self, text: str) -> Verdict:
        verdict = await self._task.grade(text)
        if not verdict.is_judged:
            shown = text if len(text) <= 80 else f"...{text[-77:]}"
            raise PenstockError(
                f"the reward service did not judge {shown!r}: status {verdict.status}; see its log, and raise "
                "reward.deadline_s if it is a TIMEOUT"
            )
        return verdict

    def _reward(self, score: float, is_right: bool) -> float:
        return score * self._discount**self._num_wrong if is_right else score

    def _go_on(self, text: str, kind: str, *, score: float | None = None, reward: float | None = None) -> StepResult:
        message = Message(role="tool" if self._show_tools else "user", parts=(TextPart(text=text),))
        return StepResult(
            observation=Observation(messages=(message,)), reward=reward, metrics=self._metrics(score), kind=kind
        )

    def _end(self, kind: str, *, score: float | None = None, reward: float | None = None) -> StepResult:
        return StepResult(observation=None, reward=reward, metrics=self._metrics(score), kind=kind)

    def _metrics(self, score: float | None) -> dict[str, float]:
        """Return the episode's metrics after this step, whose answer has `score`."""
        metrics = {"num_checks": float(self._num_checks), "tool_use": float(self._has_called)}
        if score is not None:
            metrics["score"] = score
            if not self._has_attempted:
                metrics["first_attempt_accuracy"] = float(score >= self._right_from)
                self._has_attempted = True
        return metrics

    def _instructed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the conversation with the instruction, and no second system message, which templates would drop."""
        if self._instruction == "none":
            return messages
        form = "" if self._show_tools else f", for example {_EXAMPLE}"
        text = (
            f"You may check an answer with the tool {TOOL_NAMES[0]}, once per turn{form}. You have {self._max_turns} "
            f"turns, and each wrong check lowers your reward. When you are sure, {_FINISH} and call no tool."
        )
        role: Literal["user", "system"] = "user" if self._instruction == "suffix" else "system"
        indices = [number for number, message in enumerate(messages) if message.role == role]
        if not indices and role == "system":
            return (Message(role=role, parts=(TextPart(text=text),)), *messages)
        if not indices:
            raise PenstockError('geo3k_tools: the row has no user message for instruction = "suffix"; use "system"')
        index = indices[-1]
        changed = msgspec.structs.replace(messages[index], parts=(*messages[index].parts, TextPart(text=f"\n\n{text}")))
        return (*messages[:index], changed, *messages[index + 1 :])
