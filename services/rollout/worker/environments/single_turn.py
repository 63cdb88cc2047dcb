"""One question, one answer."""

from penstock.records import Prompt
from services.rollout.worker.environments.base import Observation, StepResult


class SingleTurn:
    """Shows the prompt as it is and ends after the first turn."""

    async def reset(self, prompt: Prompt, images: tuple[bytes, ...]) -> Observation:
        """The prompt's own messages and images."""
        return Observation(messages=prompt.messages, images=images)

    async def step(self, text: str) -> StepResult:
        """The end."""
        return StepResult(observation=None)

    async def close(self) -> None:
        """Nothing is held."""
