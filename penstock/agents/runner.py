"""The interface of runners: code that plays one sample by calling the policy over HTTP, as often as it likes.

A runner gets its own base URL and speaks the OpenAI API to it. The policy's answers there are recorded with their
tokens, so a runner never handles token ids and returns at most a reward.
"""

import dataclasses
import numbers
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self, TypeAlias

from penstock.environments import Task
from penstock.environments.openai_messages import write_messages
from penstock.runtime.numbers import finite_float, shown

MODEL: Final = "policy"
"""The `model` that agents may send; sessions accept any name."""

_MAX_ERROR_CHARS = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """A runner's inputs for one sample."""

    base_url: str
    """Base URL of the OpenAI API, for this sample alone: the calls made there are what is trained."""
    router_url: str
    """The router, `http(s)://host:port`, for a client with one base URL for all samples, `<router_url>/v1`: calls with
    this session's `headers` belong to this sample."""
    headers: Mapping[str, str]
    """Headers for calls at `<router_url>/v1/chat/completions`."""
    api_key: str
    """Key to this base URL and nothing else."""
    task: Task
    """The dataset row. Its golds are for the reward: an agent that shows them to the policy teaches it nothing."""
    timeout_s: float
    """Seconds of the sample's time. Then the runner is stopped and the session closed. While the sample has no answer,
    that is up to 75 s later, so that the tokens of an answer in progress are recorded. Give clients that much
    longer."""
    model: str = MODEL
    """The value to send as `model`."""
    tls: ssl.SSLContext | None = None
    """TLS context for clients in this process, if `base_url` is https and the run's own authority signed it. It
    includes the client certificate that `security.mutual` requires. None: `security` has no TLS."""
    tls_ca: str = ""
    """Path of that authority's PEM file, for clients in other processes; empty: the system's authorities."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The row's conversation in OpenAI's form, with its images inline."""
        return write_messages(self.task.messages, self.task.images)

    def to_json(self) -> dict[str, Any]:
        """Return the session as plain data for runners in other processes."""
        task = self.task
        return {
            "base_url": self.base_url,
            "router_url": self.router_url,
            "headers": dict(self.headers),
            "api_key": self.api_key,
            "model": self.model,
            "timeout_s": self.timeout_s,
            "tls_ca": self.tls_ca,
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
    """A runner's result."""

    reward: float | None = None
    """None: the reward service judges the text of the policy's last answer."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other measurements by name; kept with the sample."""
    error: str | BaseException | None = ""
    """Why the sample has no reward; it is then not trained on, but kept with its reason. None and "": it has one. The
    result holds text: an exception becomes its text, None becomes "", and the first 2,000 characters are kept."""

    def __post_init__(self) -> None:
        if self.reward is not None:
            reward = _number(self.reward)
            if reward is None:
                raise ValueError(
                    f"reward = {shown(self.reward)} must be a finite number, or None if the reward service decides"
                )
            object.__setattr__(self, "reward", reward)
        metrics = {name: _number(value) for name, value in self.metrics.items()}
        if wrong := [f"{name} = {shown(self.metrics[name])}" for name, value in metrics.items() if value is None]:
            raise ValueError(f"metrics {', '.join(wrong)} must be finite numbers; leave out what was not measured")
        object.__setattr__(self, "metrics", {str(name): value for name, value in metrics.items()})
        error = (str(self.error) or repr(self.error)) if self.error else ""
        object.__setattr__(self, "error", error[:_MAX_ERROR_CHARS])

    @classmethod
    def read(cls, value: object) -> Self:
        """Return the result that a runner returned as a result, its fields as a mapping, a reward, or None.

        Raises:
            ValueError: it is none of these, or has a field that is unknown or not a number.
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
            error=value.get("error"),
        )


Runner: TypeAlias = Callable[[AgentSession], Awaitable[Any] | Any]
"""Plays one sample: a coroutine function, or a function that may block. Returns a value for `AgentResult.read`."""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return finite_float(value)
