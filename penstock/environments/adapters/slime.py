"""Plays the interaction environments of slime (and miles): a file with `build_env`, unchanged.

    [worker.environments.mine]
    class = "penstock.environments.adapters:SlimeEnvironment"
    args = {env = "env_mine.py", config = {max_turns = 3}}

The interface: `build_env(sample, args)` makes an object with `reset()`, `step(text)`, `format_observation(observation)`
and optionally `close()`. `step` returns (observation, done, info), and `format_observation` makes a message of an
observation. As in slime, the result of `reset` is not shown, and neither is an observation that ends the episode. Turns
are counted here, because slime counts them in its loop.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from penstock.environments.adapters.answers import open_images, read_mapping, read_metrics
from penstock.environments.adapters.wrapped_code import load_module
from penstock.environments.openai_messages import read_messages, write_messages
from penstock.environments.protocol import BlockingTask, Observation, StepResult
from penstock.errors import ConfigError, EnvironmentFailedError
from penstock.model.chat.assistant_turn import AssistantTurn


@dataclasses.dataclass
class Sample:
    """A row as `build_env` sees it: the fields of slime's class that are known before the first turn."""

    index: str
    prompt: list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any]
    multimodal_inputs: dict[str, Any] | None


class SlimeEnvironment:
    """One episode of an environment made by `build_env`. It gives no reward: the reward service judges."""

    def __init__(self, env: str, config: Mapping[str, Any] | None = None) -> None:
        """Wrap the environments of `env`.

        Args:
            env: "package.module", or the path of a file that ends with ".py": the value of slime's
                `--rollout-interaction-env-path`.
            config: The contents of slime's `--custom-config-path`, which become attributes of `args`. `max_turns`, the
                turns after which an episode ends, is the task's, if the task has one.

        Raises:
            ConfigError: the file cannot be imported, or has no `build_env`; or `max_turns` is no number of turns.
        """
        self._name = env
        self._build = _find_build(env)
        self._config = dict(config or {})
        self._max_turns = _read_max_turns(self._config)
        self._num_turns = 0
        self._env: Any = None

    @classmethod
    def prepare(cls, env: str, config: Mapping[str, Any] | None = None) -> None:
        """Import the file, once for all episodes.

        Raises:
            ConfigError: as in `__init__`.
        """
        cls(env, config)

    def reset(self, task: BlockingTask) -> Observation:
        """Build the row's environment; the policy sees the row's prompt.

        Raises:
            EnvironmentFailedError: the built object is not an environment.
        """
        self._max_turns = self._max_turns if task.max_turns is None else task.max_turns
        self._env = self._build_env(self._make_sample(task), self._make_args())
        wanted = ("reset", "step", "format_observation")
        if missing := [name for name in wanted if not callable(getattr(self._env, name, None))]:
            raise EnvironmentFailedError(
                f"build_env of {self._name} returned {type(self._env).__name__}, which has no {', '.join(missing)}; "
                "add what is missing, or derive it from slime's BaseInteractionEnv"
            )
        self._env.reset()
        return Observation(messages=task.messages, images=task.images, tools=task.tools)

    def step(self, turn: AssistantTurn) -> StepResult:
        """Pass on the turn's whole text. The last turn that the limit allows ends the episode as truncated, if the
        environment does not end it.

        Raises:
            EnvironmentFailedError: the answer cannot be shown.
        """
        self._num_turns += 1
        what = f"{type(self._env).__name__}.step of {self._name}"
        match self._env.step(turn.text):
            case (observation, done, info):
                metrics = read_metrics(info, f"info of {what}")
            case answer:
                raise EnvironmentFailedError(f"{what} returned {answer!r}; it must return (observation, done, info)")
        if done:
            truncated = bool(read_mapping(info, f"info of {what}").get("truncated"))
            return StepResult(observation=None, truncated=truncated, metrics=metrics)
        if self._num_turns == self._max_turns:
            return StepResult(observation=None, truncated=True, metrics=metrics)
        message = self._env.format_observation(observation)
        where = f"format_observation of {type(self._env).__name__} in {self._name}"
        return StepResult(observation=read_messages([message], where), metrics=metrics)

    def close(self) -> None:
        """Close the environment, if it has `close`."""
        if callable(close := getattr(self._env, "close", None)):
            close()

    def _build_env(self, sample: Sample, args: SimpleNamespace) -> Any:
        """Call `build_env` by keyword, or by position if its parameters have other names."""
        try:
            inspect.signature(self._build).bind(sample=sample, args=args)
        except TypeError:
            return self._build(sample, args)
        return self._build(sample=sample, args=args)

    def _make_sample(self, task: BlockingTask) -> Sample:
        metadata = task.extra.get("metadata")
        return Sample(
            index=task.id,
            prompt=write_messages(task.messages, task.images),
            label=task.golds[0] if task.golds else None,
            metadata=dict(metadata if isinstance(metadata, Mapping) else task.extra),
            multimodal_inputs={"images": open_images(task.images)} if task.images else None,
        )

    def _make_args(self) -> SimpleNamespace:
        return SimpleNamespace(**{**self._config, "max_turns": self._max_turns})


def _find_build(env: str) -> Callable[..., Any]:
    build: Any = getattr(load_module(env), "build_env", None)
    if not callable(build):
        raise ConfigError(f'env = "{env}" has no build_env; define build_env(sample, args), which makes an environment')
    return build  # type: ignore[no-any-return]


def _read_max_turns(config: Mapping[str, Any]) -> int | None:
    value = config.get("max_turns")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(
            f"config.max_turns = {value!r} is not a number of turns; give an integer >= 1, or leave it out"
        )
    return value
