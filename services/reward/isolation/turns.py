"""Whose turn it is: items in the order in which they came, so many at once, and none that holds its turn for long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Turn:
    """The right to a worker. An item that has it for long goes into overtime: another one gets its turn meanwhile."""

    def __init__(self, turns: "Turns") -> None:
        self.is_overtime = False
        """Whether the turn was passed on."""
        self._turns = turns
        self._timer: asyncio.TimerHandle | None = None
        self._on_overtime: Callable[[], None] = _nothing

    def start(self, on_overtime: Callable[[], None]) -> None:
        """Let time run; call `on_overtime` when the turn is passed on."""
        self._on_overtime = on_overtime
        self._timer = asyncio.get_running_loop().call_later(self._turns.overtime_after_s, self._pass_on)

    def end(self) -> None:
        """Give back what is still held."""
        if self._timer is not None:
            self._timer.cancel()
        self._turns.end(self)

    def _pass_on(self) -> None:
        if self._turns.try_overtime(self):
            self._on_overtime()
        else:
            self.start(self._on_overtime)  # another one's overtime may end


class Turns:
    """At most `num_turns` at once, and `max_overtime` more that were passed on."""

    def __init__(self, num_turns: int, max_overtime: int, overtime_after_s: float) -> None:
        self.num_overtime = 0
        self.num_waiting = 0
        self.overtime_after_s = overtime_after_s
        self._max_overtime = max_overtime
        self._free = asyncio.Semaphore(num_turns)

    @contextlib.asynccontextmanager
    async def next(self) -> AsyncIterator[Turn]:
        """Wait for a turn, and hold it while the context lasts."""
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        turn = Turn(self)
        try:
            yield turn
        finally:
            turn.end()

    def try_overtime(self, turn: Turn) -> bool:
        """Pass `turn` on, if not too many are in overtime."""
        if self.num_overtime >= self._max_overtime:
            return False
        self.num_overtime += 1
        turn.is_overtime = True
        self._free.release()
        return True

    def end(self, turn: Turn) -> None:
        """Free what `turn` holds."""
        if turn.is_overtime:
            self.num_overtime -= 1
        else:
            self._free.release()


def _nothing() -> None:
    pass
