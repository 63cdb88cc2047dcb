"""An environment in which a policy calls tools and then answers; a custom one is just a list of functions.

Invariant: in each turn, every call up to the limit is answered by one `tool` message, in the calls' order, whether or
not it succeeds. Unreadable calls come after the others, and one more message covers the surplus. A failed call does not
end its neighbours.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from penstock.environments.protocol import Observation, StepResult, Task
from penstock.environments.tools import Tool, ToolError, ToolResult, shorten
from penstock.errors import InvalidRequestError, PenstockError
from penstock.model.chat.assistant_turn import AssistantTurn
from penstock.records import ImagePart, Message, TextPart
from penstock.runtime.text import printable

_MAX_QUOTED = 80


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    result: ToolResult
    is_failed: bool = False


class ToolEnvironment:
    """Shows the task and the tools, answers calls, and ends at the first turn without a call.

    It gives no reward: the reward service judges the last turn. To change that, override `step` in a subclass.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., object]],
        *,
        max_calls_per_turn: int = 4,
        max_turns: int | None = None,
        show_tools: bool = True,
        announce_last_turn: bool = True,
    ) -> None:
        """Play one episode with `tools`.

        Args:
            tools: Tools, or typed functions that `Tool.from_function` converts.
            max_calls_per_turn: Further calls of a turn are ignored.
            max_turns: The policy's turns, including the answer; the task's own limit applies as well. Calls in the last
                turn are ignored, and the episode ends as truncated.
            show_tools: Have the chat template show the tools. False if the rows explain them, or the policy knows them.
            announce_last_turn: Tell the policy when one turn is left.

        Raises:
            ValueError: a limit is below 1, or two tools have the same name.
        """
        if max_calls_per_turn < 1 or (max_turns is not None and max_turns < 1):
            raise ValueError(
                f"max_calls_per_turn = {max_calls_per_turn} and max_turns = {max_turns} must be at least 1"
            )
        self._tools: dict[str, Tool] = {}
        self._to_close: list[Tool] = []
        for tool in tools:
            self.add_tool(tool)
        self._max_calls = max_calls_per_turn
        self._max_turns = max_turns
        self._shows_tools = show_tools
        self._announces_last_turn = announce_last_turn
        self._num_turns = 0
        self._counts = {"num_calls": 0.0, "num_failed_calls": 0.0, "tool_use": 0.0}

    def add_tool(self, tool: Tool | Callable[..., object]) -> None:
        """Add a tool, for a subclass whose tools depend on the task; call it before this class's `reset`.

        Raises:
            ValueError: the name is taken, or the function cannot become a tool.
        """
        made = tool if isinstance(tool, Tool) else Tool.from_function(tool)
        if made.name in self._tools:
            raise ValueError(f"there are two tools called {made.name!r}; each needs a name of its own")
        self._tools[made.name] = made
        self._to_close.append(made)

    async def reset(self, task: Task) -> Observation:
        """Return the task's messages and images, and the tools; if the task names some, only those.

        Raises:
            InvalidRequestError: the task names a tool that this environment lacks.
        """
        if task.tools:
            self._tools = {name: self._find(name) for name in map(_name_of, task.tools)}
        limits = [limit for limit in (self._max_turns, task.max_turns) if limit is not None]
        self._max_turns = min(limits, default=None)
        tools = tuple(tool.schema for tool in self._tools.values()) if self._shows_tools else ()
        return Observation(messages=task.messages, images=task.images, tools=tools)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Return the tools' answers, or end the episode."""
        self._num_turns += 1
        num_calls = len(turn.calls) + len(turn.malformed_calls)
        num_left = None if self._max_turns is None else self._max_turns - self._num_turns
        if num_calls == 0 or num_left == 0:
            metrics = self._count(num_calls, 0, is_used=False)
            return StepResult(observation=None, truncated=num_calls > 0, metrics=metrics)
        replies = await self._answer_all(turn)
        num_failed = sum(reply.is_failed for reply in replies) + max(0, num_calls - self._max_calls)
        if num_calls > self._max_calls:
            words = f"Calls {self._max_calls + 1} to {num_calls} were not made: a turn may have {self._max_calls}."
            replies.append(_failed(words))
        if num_left == 1 and self._announces_last_turn:
            words = "One turn is left: give the final answer without a call."
            replies[-1] = dataclasses.replace(replies[-1], result=replies[-1].result.with_words(words))
        is_used = not all(reply.is_failed for reply in replies)
        metrics = self._count(num_calls, num_failed, is_used=is_used)
        return StepResult(observation=_observe(replies), metrics=metrics)

    async def close(self) -> None:
        """Close all tools, even if one fails."""
        closing = [tool.close() for tool in self._to_close if tool.close is not None]
        failures = [found for found in await asyncio.gather(*closing, return_exceptions=True) if found is not None]
        if failures:
            raise failures[0]

    def _count(self, num_calls: int, num_failed: int, *, is_used: bool) -> dict[str, float]:
        """Add a turn to the episode's counts and return them; `tool_use` is 1 once a tool has answered a call."""
        counts = self._counts
        counts["num_calls"] += num_calls
        counts["num_failed_calls"] += num_failed
        counts["tool_use"] = max(counts["tool_use"], float(is_used))
        return dict(counts)

    async def _answer_all(self, turn: AssistantTurn) -> list[_Reply]:
        calls = turn.calls[: self._max_calls]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(call.name, call.arguments)) for call in calls]
        except* PenstockError as failed:
            raise failed.exceptions[0] from None
        malformed = turn.malformed_calls[: self._max_calls - len(calls)]
        return [task.result() for task in tasks] + [
            _failed(f"This call cannot be read; write it as the tools' instructions show: {shorten(block.strip())}")
            for block in malformed
        ]

    async def _answer(self, name: str, arguments: Mapping[str, object]) -> _Reply:
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return _failed(f"There is no tool {shorten(name, _MAX_QUOTED)!r}; the tools are: {known}.")
        try:
            return _Reply(await tool.call(arguments))
        except ToolError as error:
            return _failed(f"Error in {name}: {error}")

    def _find(self, name: str) -> Tool:
        if name not in self._tools:
            raise InvalidRequestError(
                f"the row's tools name {name!r}, which its environment has not; it has: {', '.join(self._tools)}; "
                "remove it from the row, or give the row an environment that has it"
            )
        return self._tools[name]


def _failed(words: str) -> _Reply:
    return _Reply(ToolResult(text=words), is_failed=True)


def _observe(replies: Sequence[_Reply]) -> Observation:
    """Make one `tool` message of each reply, with its texts and images in order."""
    images: list[bytes] = []
    messages = []
    for reply in replies:
        parts: list[TextPart | ImagePart] = []
        for part in reply.result.content:
            if isinstance(part, str):
                parts.append(TextPart(text=printable(part)))
            else:
                parts.append(ImagePart(index=len(images)))
                images.append(part)
        messages.append(Message(role="tool", parts=tuple(parts)))
    return Observation(messages=tuple(messages), images=tuple(images))


def _name_of(schema: Mapping[str, object]) -> str:
    function = schema.get("function", schema)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
