"""An environment that rewards by the length of a sample, so that no reward service is needed."""

from penstock.environments import AssistantTurn, Observation, StepResult, Task


class Graded:
    """Shows the prompt as it is, and ends after the first turn with a reward."""

    async def reset(self, task: Task) -> Observation:
        """Return the prompt's own messages."""
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """End the episode."""
        return StepResult(observation=None, reward=float(len(turn.text) % 2))

    async def close(self) -> None:
        """Do nothing: no resource is held."""
