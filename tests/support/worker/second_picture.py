"""An environment that shows a picture of its own, whatever the policy says."""

import asyncio
import io

from PIL import Image

from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.records import ImagePart, Message, TextPart

_SIZE = (160, 96)


class SecondPicture:
    """Shows another picture after the first turn and ends after the second, which the reward service judges."""

    def __init__(self) -> None:
        self._num_turns = 0

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        self._num_turns += 1
        await asyncio.sleep(0.002)  # shorter answers have no span
        if self._num_turns == 2:
            return StepResult(observation=None)
        file = io.BytesIO()
        Image.linear_gradient("L").resize(_SIZE).convert("RGB").save(file, "PNG")
        shown = Message(role="user", parts=(TextPart(text="And here? "), ImagePart(index=0)))
        return StepResult(observation=Observation(messages=(shown,), images=(file.getvalue(),)))

    async def close(self) -> None:
        """Nothing is held."""
