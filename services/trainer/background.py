"""Background work beside the training loop, one task of a kind at a time."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Lane:
    """Runs at most one task at a time. An error in it ends the task group, and with it the loop."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        """Run the work in `tasks`."""
        self._tasks = tasks
        self._current: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`; await `free` first."""
        assert self.is_free, "one piece of work at a time"
        self._current = self._tasks.create_task(work)

    @property
    def is_free(self) -> bool:
        """Whether no task runs."""
        return self._current is None or self._current.done()

    async def free(self) -> None:
        """Wait until no task runs."""
        if self._current is not None:
            await asyncio.wait({self._current})
            if self._current.cancelled():
                raise RuntimeError("work beside the training loop was cancelled by something else than the loop's end")
