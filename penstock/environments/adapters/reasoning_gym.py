"""Grades tasks of reasoning-gym with the scorer of the generator that made them.

    [worker.environments.reasoning_gym]
    class = "penstock.environments.adapters:ReasoningGymEnvironment"

A row has the whole item of reasoning-gym in its column `entry`. Scorers need the item's metadata, which a verifier of
the reward service does not see. Some take long, which here delays only their own sample.
"""

from collections.abc import Mapping
from typing import Any

from penstock.environments.adapters.answers import read_reward
from penstock.environments.adapters.wrapped_code import load_module
from penstock.environments.protocol import BlockingTask, Observation, StepResult
from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.chat.assistant_turn import AssistantTurn


class ReasoningGymEnvironment:
    """One question and one answer, whose score is the reward."""

    def __init__(self, tag: str = "answer") -> None:
        """Grade the text that the policy writes inside `<tag>`; empty: everything after its reasoning."""
        self._tag = tag
        self._entry: Mapping[str, Any] = {}

    @classmethod
    def prepare(cls, tag: str = "answer") -> None:
        """Import the package, once for all episodes.

        Raises:
            ConfigError: the package is not installed.
        """
        _load()

    def reset(self, task: BlockingTask) -> Observation:
        """Return the row's prompt.

        Raises:
            InvalidRequestError: the row has no item of reasoning-gym.
        """
        entry = task.extra.get("entry")
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise InvalidRequestError(
                f"the row's column entry = {str(entry)[:120]} is no item of reasoning-gym with "
                "metadata.source_dataset; write the whole item there, and keep the column in data.extra_columns"
            )
        self._entry = entry  # type: ignore[assignment]
        return Observation(messages=task.messages, images=task.images)

    def step(self, turn: AssistantTurn) -> StepResult:
        """End the episode with the answer's score; an answer without the tag scores like no answer."""
        package = _load()
        name = self._entry["metadata"]["source_dataset"]
        answer = package.utils.extract_answer(turn.content, tag_name=self._tag) if self._tag else turn.content
        score = package.get_score_answer_fn(name)(answer, dict(self._entry))
        return StepResult(
            observation=None,
            reward=read_reward(score, f"score_answer of {name}"),
            metrics={"answered": float(answer is not None)},
        )

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _load() -> Any:
    try:
        return load_module("reasoning_gym")
    except ConfigError as error:
        raise ConfigError(
            f"reasoning-gym cannot be used; pip install reasoning-gym where workers run ({error})"
        ) from None
