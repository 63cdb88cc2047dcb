"""The interface of runners: code that plays one sample by calling the policy over HTTP, as often as it likes.

A runner is given a base URL of its own and speaks the OpenAI API to it. What the policy answers there is recorded with
its tokens, so a runner never deals in token ids, and returns no more than a reward.
"""

import base64
import dataclasses
import json
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self, TypeAlias

from penstock.environments import Task
from penstock.records import Message, TextPart

MODEL: Final = "policy"
"""What agents may send as `model`; sessions take any name."""

_MAX_ERROR_CHARS = 2000
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """What a runner is given for one sample."""

    base_url: str
    """Of the OpenAI API, for this sample alone: its calls are what is trained."""
    api_key: str
    """Opens this base URL and nothing else."""
    task: Task
    """The row of the data. Its golds are for the reward: an agent that shows them to the policy teaches it nothing."""
    timeout_s: float
    """Seconds until the runner is ended and the session closed."""
    model: str = MODEL
    """To send as `model`."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The row's conversation in OpenAI's form, with its images inside."""
        return [_plain(message, self.task.images) for message in self.task.messages]

    def to_json(self) -> dict[str, Any]:
        """What runners in other processes are given."""
        task = self.task
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "model": self.model,
            "timeout_s": self.timeout_s,
            "task": {
                "id": task.id,
                "seed": task.seed,
                "messages": self.messages,
                "tools": [dict(tool) for tool in task.tools],
                "golds": list(task.golds),
                "profile": task.profile,
                "extra": dict(task.extra),
                "max_turns": task.max_turns,
            },
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What a runner returns."""

    reward: float | None = None
    """None: the reward service judges the text of the policy's last answer."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What else was measured, by name; kept with the sample."""
    error: str = ""
    """Why the sample has no reward; it is then trained on by nobody, but kept with its reason."""

    def __post_init__(self) -> None:
        if self.reward is not None and (not _is_number(self.reward) or not math.isfinite(self.reward)):
            raise ValueError(f"reward = {self.reward!r} must be a finite number, or None if the reward service decides")
        fine = {name for name, value in self.metrics.items() if _is_number(value) and math.isfinite(value)}
        if wrong := {name: value for name, value in self.metrics.items() if name not in fine}:
            raise ValueError(f"metrics {wrong} must be finite numbers; leave out what was not measured")

    @classmethod
    def read(cls, value: object) -> Self:
        """What a runner returned: a result, its fields as a mapping, a reward, or None.

        Raises:
            ValueError: it is none of these, or has a field that is unknown or no number.
        """
        if isinstance(value, cls):
            return value
        if value is None or isinstance(value, numbers.Real):
            return cls(reward=value)  # type: ignore[arg-type]
        if not isinstance(value, Mapping):
            raise ValueError(f"a runner returns a reward, None or an AgentResult, not {type(value).__name__}")
        fields = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(map(str, set(value) - fields)):
            raise ValueError(f"the result has unknown fields {unknown}; it may have {sorted(fields)}")
        metrics = value.get("metrics") or {}
        if not isinstance(metrics, Mapping):
            raise ValueError(f"metrics = {metrics!r} must map names to numbers")
        return cls(
            reward=value.get("reward"),
            metrics={str(name): number for name, number in metrics.items()},
            error=str(value.get("error") or "")[:_MAX_ERROR_CHARS],
        )


Runner: TypeAlias = Callable[[AgentSession], Awaitable[Any] | Any]
"""Plays one sample: a coroutine function, or a function that may block. Returns what `AgentResult.read` takes."""


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _plain(message: Message, images: tuple[bytes, ...]) -> dict[str, Any]:
    has_text_alone = all(isinstance(part, TextPart) for part in message.parts)
    content: Any = [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": _data_url(images[part.index])}}
        for part in message.parts
    ]
    if has_text_alone:
        content = "".join(part["text"] for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _data_url(image: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
