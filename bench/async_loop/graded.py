"""An environment that rewards by the length of a sample, so that no reward service takes part."""

from penstock.records import Prompt
from services.rollout.worker.environments.base import Observation, StepResult


class Graded:
    """Shows the prompt as it is, and ends after the first turn with a reward."""

    async def reset(self, prompt: Prompt, images: tuple[bytes, ...]) -> Observation:
        """The prompt's own messages."""
        return Observation(messages=prompt.messages, images=images)

    async def step(self, text: str) -> StepResult:
        """The end."""
        return StepResult(observation=None, reward=float(len(text) % 2))

    async def close(self) -> None:
        """Nothing is held."""
