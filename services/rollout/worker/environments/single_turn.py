"""One question, one answer."""

from penstock.environments import AssistantTurn, Observation, StepResult, Task


class SingleTurn:
    """Shows the prompt as it is and ends after the first turn."""

    async def reset(self, task: Task) -> Observation:
        """Return the row's own messages, images and tools."""
        return Observation(messages=task.messages, images=task.images, tools=task.tools)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """End the episode."""
        return StepResult(observation=None)

    async def close(self) -> None:
        """Do nothing: no resource is held."""
