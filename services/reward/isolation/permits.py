"""Permits to use a worker: given in order of arrival, a bounded number at once, and none held for long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Permit:
    """The right to a worker. An item that holds it for long goes into overtime: its permit is given to another item."""

    def __init__(self, permits: "Permits") -> None:
        self.is_overtime = False
        """Whether the permit was given to another item."""
        self._permits = permits
        self._timer: asyncio.TimerHandle | None = None
        self._on_overtime: Callable[[], None] = _nothing

    def start(self, on_overtime: Callable[[], None]) -> None:
        """Start the clock; `on_overtime` is called when the permit is given to another item."""
        self._on_overtime = on_overtime
        self._timer = asyncio.get_running_loop().call_later(self._permits.overtime_after_s, self._pass_on)

    def end(self) -> None:
        """Give back the permit or the overtime."""
        if self._timer is not None:
            self._timer.cancel()
        self._permits.end(self)

    def _pass_on(self) -> None:
        if self._permits.try_overtime(self):
            self._on_overtime()
        else:
            self.start(self._on_overtime)  # another item's overtime may end


class Permits:
    """Gives out at most `num_permits` at once; `max_overtime` further items may be in overtime."""

    def __init__(self, num_permits: int, max_overtime: int, overtime_after_s: float) -> None:
        self.num_overtime = 0
        self.num_waiting = 0
        self.overtime_after_s = overtime_after_s
        self._max_overtime = max_overtime
        self._free = asyncio.Semaphore(num_permits)

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Permit]:
        """Wait for a permit, and hold it during the context."""
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        permit = Permit(self)
        try:
            yield permit
        finally:
            permit.end()

    def try_overtime(self, permit: Permit) -> bool:
        """Give `permit` to another item, unless too many items are in overtime."""
        if self.num_overtime >= self._max_overtime:
            return False
        self.num_overtime += 1
        permit.is_overtime = True
        self._free.release()
        return True

    def end(self, permit: Permit) -> None:
        """Release what `permit` holds."""
        if permit.is_overtime:
            self.num_overtime -= 1
        else:
            self._free.release()


def _nothing() -> None:
    pass
