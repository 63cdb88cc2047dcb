"""Plays the environments of SkyRL-Gym: classes with `init` and `step`, unchanged.

    [worker.environments.mine]
    class = "penstock.environments.adapters:SkyRLEnvironment"
    args = {env = "my_package.env:MyEnv", config = {size = 4}}

The interface: the class takes `env_config` and `extras`; `init(prompt)` returns (messages, info), `step(text)` a dict
of observations, reward, done and metadata; `get_metrics()` and `close()` are optional.
"""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.environments.adapters.answers import read_mapping, read_metrics, read_reward
from penstock.environments.adapters.wrapped_code import load_member, load_module
from penstock.environments.openai_messages import read_messages, write_messages
from penstock.environments.protocol import BlockingTask, Observation, StepResult
from penstock.errors import ConfigError, EnvironmentFailedError
from penstock.model.chat.assistant_turn import AssistantTurn


class EnvConfig(dict[str, Any]):
    """Settings that can be read as items and as attributes, like SkyRL's."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"config of the environment has no {name!r}; set it in args.config") from None
        return EnvConfig(value) if isinstance(value, dict) else value


class SkyRLEnvironment:
    """One episode of an environment of SkyRL-Gym."""

    def __init__(self, env: str, config: Mapping[str, Any] | None = None) -> None:
        """Wrap the class `env`.

        Args:
            env: "package.module:Class" or "file.py:Class", or a name that is registered with the installed skyrl_gym.
            config: The class's `env_config`. `max_turns` is passed on in `extras`, unless the task has its own limit.
        """
        self._name = env
        self._make = _find(env)
        self._config = EnvConfig(config or {})
        self._env: Any = None

    @classmethod
    def prepare(cls, env: str, config: Mapping[str, Any] | None = None) -> None:
        """Import the class, once for all episodes.

        Raises:
            ConfigError: the class cannot be imported.
        """
        _find(env)

    def reset(self, task: BlockingTask) -> Observation:
        """Make the row's environment; the policy sees what its `init` returns.

        Raises:
            EnvironmentFailedError: the result cannot be shown, or the object is not an environment.
        """
        self._env = self._make(env_config=self._config, extras=self._make_extras(task))
        if missing := [name for name in ("init", "step") if not callable(getattr(self._env, name, None))]:
            raise EnvironmentFailedError(
                f"{self._name} made {type(self._env).__name__}, which has no {', '.join(missing)}; derive it from "
                "SkyRL-Gym's BaseTextEnv"
            )
        what = f"init of {self._name}"
        match self._env.init(write_messages(task.messages, task.images)):
            case (messages, _):
                first = read_messages(messages, f"messages of {what}")
            case answer:
                raise EnvironmentFailedError(f"{what} returned {answer!r}; it must return (messages, info)")
        return Observation(messages=first.messages, images=first.images, tools=task.tools)

    def step(self, turn: AssistantTurn) -> StepResult:
        """Pass on the turn's whole text.

        Raises:
            EnvironmentFailedError: the answer cannot be shown or trained on.
        """
        what = f"step of {self._name}"
        answer = read_mapping(self._env.step(turn.text), what)
        if missing := [name for name in ("observations", "reward", "done") if name not in answer]:
            raise EnvironmentFailedError(f"{what} returned {dict(answer)!r} without {', '.join(missing)}; add them")
        rewritten = answer.get("postprocessed_action")
        if rewritten is not None and rewritten != turn.text:
            raise EnvironmentFailedError(
                f"{what} returned postprocessed_action = {rewritten!r}; what the policy said is never rewritten, "
                "because exactly its tokens are trained: leave it out"
            )
        reward = read_reward(answer["reward"], f"reward of {what}")
        metrics = self._read_metrics()
        if answer["done"]:
            metadata = read_mapping(answer.get("metadata"), f"metadata of {what}")
            truncated = bool(metadata.get("truncated"))
            return StepResult(observation=None, truncated=truncated, reward=reward, metrics=metrics)
        observation = read_messages(answer["observations"], f"observations of {what}")
        if not observation.messages:
            raise EnvironmentFailedError(
                f"{what} returned done = False and no observations; return a message to answer, or done = True"
            )
        return StepResult(observation=observation, reward=reward, metrics=metrics)

    def close(self) -> None:
        """Close the environment, if it has `close`."""
        if callable(close := getattr(self._env, "close", None)):
            close()

    def _read_metrics(self) -> dict[str, float]:
        """Return the metrics; read after each step, because a budget may end the episode early."""
        get_metrics = getattr(self._env, "get_metrics", dict)
        return read_metrics(get_metrics(), f"get_metrics of {self._name}")

    def _make_extras(self, task: BlockingTask) -> dict[str, Any]:
        """Return the row's other columns, the gold answer under SkyRL's name for it, and the limit."""
        extras = dict(task.extra)
        if task.golds:
            extras.setdefault("reward_spec", {"method": "rule", "ground_truth": task.golds[0]})
        max_turns = self._config.get("max_turns") if task.max_turns is None else task.max_turns
        if max_turns is not None:
            extras["max_turns"] = max_turns
        return extras


def _find(env: str) -> Callable[..., Any]:
    """Return the factory of environments that `env` names.

    Raises:
        ConfigError: there is no such class, and no installed skyrl_gym that knows the name.
    """
    if ":" in env:
        return load_member(env)  # type: ignore[no-any-return]
    try:
        make = load_module("skyrl_gym").make
    except ConfigError as error:
        raise ConfigError(f'env = "{env}" is a name of skyrl_gym, for want of a colon, and {error}') from None
    return lambda **arguments: make(env, **arguments)
