"""Plays the environments of TRL's `environment_factory`: classes whose public methods are tools, unchanged.

    [worker.environments.mine]
    class = "penstock.environments.adapters:TRLEnvironment"
    args = {env = "my_package.env:MyEnv"}

The interface: `reset(**row)` may return something to append to the prompt. Every public method is a tool with typed
arguments and a docstring, which returns anything, or a list of parts with pictures. `get_reward()`, if there is one, is
called once when the episode ends. Methods may be async.
"""

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.environments.adapters.answers import open_images, read_reward
from penstock.environments.adapters.wrapped_code import load_member
from penstock.environments.openai_messages import read_parts, write_messages
from penstock.environments.protocol import BlockingTask, Observation, StepResult, Task
from penstock.environments.tool_environment import ToolEnvironment
from penstock.environments.tools import Tool, ToolResult
from penstock.errors import ConfigError, EnvironmentFailedError
from penstock.model.chat.assistant_turn import AssistantTurn
from penstock.records import ImagePart, Message, TextPart, Verdict

_RESERVED = ("reset", "get_reward")


class TRLEnvironment:
    """One episode of an environment of TRL. Without `get_reward` the reward service judges the last turn."""

    def __init__(
        self,
        env: str,
        args: Mapping[str, Any] | None = None,
        answer: str = "answer",
        max_calls_per_turn: int = 16,
    ) -> None:
        """Wrap the class `env`.

        Args:
            env: "package.module:Class" or "file.py:Class"; a function that makes environments works, too.
            args: Keyword arguments of the class.
            answer: The name under which `reset` gets the row's gold answer.
            max_calls_per_turn: Further calls of a turn are ignored.
        """
        self._name = env
        self._make = _find(env)
        self._args = dict(args or {})
        self._answer = answer
        self._max_calls_per_turn = max_calls_per_turn
        self._runner = asyncio.Runner()
        self._env: Any = None
        self._tools: ToolEnvironment | None = None

    @classmethod
    def prepare(cls, env: str, **_: Any) -> None:
        """Import the class, once for all episodes.

        Raises:
            ConfigError: the class cannot be imported.
        """
        _find(env)

    def reset(self, task: BlockingTask) -> Observation:
        """Make the environment and reset it with the row; the policy sees the prompt, any addition, and the tools.

        Raises:
            EnvironmentFailedError: it has no reset, a tool lacks a type or a docstring, or its addition cannot be
                shown.
        """
        self._env = self._make(**self._args)
        if not callable(getattr(self._env, "reset", None)):
            raise EnvironmentFailedError(f"{self._name} has no reset; add reset(self, **kwargs)")
        added = self._wait_for(self._env.reset(**self._find_arguments(task)))
        self._tools = ToolEnvironment(
            self._make_tools(), max_calls_per_turn=self._max_calls_per_turn, announce_last_turn=False
        )
        fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task) if field.name != "grade"}
        first = self._runner.run(self._tools.reset(Task(**fields, grade=_in_thread(task.grade))))
        schemas = self._read_schemas()
        first = dataclasses.replace(first, tools=tuple(schemas[tool["function"]["name"]] for tool in first.tools))
        return _append(first, read_parts(added, f"what reset of {self._name} returned"))

    def step(self, turn: AssistantTurn) -> StepResult:
        """Make the turn's calls, one after another; a turn without calls ends the episode.

        Raises:
            EnvironmentFailedError: the answer of a tool or `get_reward` cannot be shown or trained on.
        """
        assert self._tools is not None, "reset comes before step"
        result = self._runner.run(self._tools.step(turn))
        if result.observation is not None or not hasattr(self._env, "get_reward"):
            return result
        reward = self._wait_for(self._env.get_reward())
        return dataclasses.replace(result, reward=read_reward(reward, f"what get_reward of {self._name} returned"))

    def close(self) -> None:
        """End the remaining work of async methods."""
        self._runner.close()

    def _find_arguments(self, task: BlockingTask) -> dict[str, Any]:
        """Return the row as arguments of `reset`; without **kwargs, only the arguments that it names."""
        row: dict[str, Any] = {"prompt": write_messages(task.messages, task.images), **task.extra}
        if task.golds:
            row.setdefault(self._answer, task.golds[0])
        parameters = inspect.signature(self._env.reset).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        if task.images and (takes_all or {"images", "image"} & parameters.keys()):
            row.setdefault("images", open_images(task.images))
            row.setdefault("image", row["images"][0])
        return row if takes_all else {name: value for name, value in row.items() if name in parameters}

    def _list_methods(self) -> list[tuple[str, Callable[..., Any]]]:
        """Return the tools by name, as TRL finds them: on the class, where properties are not run."""
        members = inspect.getmembers(type(self._env), predicate=inspect.isfunction)
        names = [name for name, _ in members if name not in _RESERVED and not name.startswith("_")]
        return [(name, getattr(self._env, name)) for name in names]

    def _read_schemas(self) -> dict[str, dict[str, Any]]:
        """Return all tools by name as TRL shows them to the policy; calls are checked by `Tool`'s stricter schema."""
        from transformers.utils import get_json_schema

        schemas = [get_json_schema(method) for _, method in self._list_methods()]
        return {schema["function"]["name"]: schema for schema in schemas}

    def _make_tools(self) -> list[Tool]:
        tools = []
        for name, method in self._list_methods():
            try:
                made = Tool.from_function(method)
            except ValueError as error:
                raise EnvironmentFailedError(
                    f"{self._name}.{name} is public and so a tool, but {error}; give each argument a type and a line "
                    "under Args:, or begin the name with an underscore"
                ) from None
            tools.append(dataclasses.replace(made, function=self._caller(name, method), timeout_s=None))
        return tools

    def _caller(self, name: str, method: Callable[..., Any]) -> Callable[..., Awaitable[ToolResult]]:
        """Return an async function that never yields while a plain method works: calls run in order, in this thread."""

        async def call(**arguments: Any) -> ToolResult:
            answer = method(**arguments)
            if inspect.isawaitable(answer):
                answer = await answer
            is_parts = isinstance(answer, list) and any(isinstance(part, Mapping) for part in answer)
            if not is_parts:
                return ToolResult(text=str(answer))
            return ToolResult(parts=read_parts(answer, f"what {self._name}.{name} returned"))

        return call

    def _wait_for(self, answer: Any) -> Any:
        return self._runner.run(_await(answer)) if inspect.isawaitable(answer) else answer


def _find(env: str) -> Callable[..., Any]:
    made = load_member(env)
    if not callable(made):
        raise ConfigError(
            f'env = "{env}" is a {type(made).__name__}; name a class, or a function that makes its objects'
        )
    return made  # type: ignore[no-any-return]


def _append(first: Observation, added: tuple[str | bytes, ...]) -> Observation:
    """Append the result of `reset` to the last message."""
    if not added:
        return first
    images = list(first.images)
    parts: list[TextPart | ImagePart] = []
    for part in added:
        if isinstance(part, str):
            parts.append(TextPart(text=part))
        else:
            parts.append(ImagePart(index=len(images)))
            images.append(part)
    *earlier, last = first.messages
    grown = Message(role=last.role, parts=(*last.parts, *parts), tool_calls=last.tool_calls)
    return dataclasses.replace(first, messages=(*earlier, grown), images=tuple(images))


def _in_thread(grade: Callable[[str], Verdict]) -> Callable[[str], Awaitable[Verdict]]:
    async def ask(text: str) -> Verdict:
        return await asyncio.to_thread(grade, text)

    return ask


async def _await(answer: Awaitable[Any]) -> Any:
    return await answer
