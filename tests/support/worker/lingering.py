"""An environment that closes when it may, for tests of what waits for that and what does not."""

import asyncio
from typing import Any, ClassVar

from penstock.environments import AssistantTurn, Observation, StepResult, Task

LINGERS = f"{__name__}:Lingers"


class Lingers:
    """Rewards its first turn, which ends the episode. Begin with `reset_all`."""

    may_close: ClassVar[asyncio.Event]
    num_open: ClassVar[int]
    max_open: ClassVar[int]
    tasks: ClassVar[set[asyncio.Task[Any] | None]]
    """The tasks that called any of them."""

    @classmethod
    def reset_all(cls) -> None:
        """None is open, and none may close."""
        cls.may_close, cls.num_open, cls.max_open, cls.tasks = asyncio.Event(), 0, 0, set()

    def __init__(self) -> None:
        Lingers.num_open += 1
        Lingers.max_open = max(Lingers.max_open, Lingers.num_open)

    async def reset(self, task: Task) -> Observation:
        """The task as it is."""
        Lingers.tasks.add(asyncio.current_task())
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """The end."""
        Lingers.tasks.add(asyncio.current_task())
        return StepResult(observation=None, reward=1.0)

    async def close(self) -> None:
        """As soon as it may."""
        Lingers.tasks.add(asyncio.current_task())
        await Lingers.may_close.wait()
        Lingers.num_open -= 1
