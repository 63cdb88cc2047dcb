"""An event loop whose clock jumps to the next timer, so that hours of waiting take no time.

Only for code that waits for timers and for itself: it must not await anything from outside.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumps(selectors.SelectSelector):
    """Records how long it would have waited, instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now."""
        if timeout is None:
            raise RuntimeError("everything waits, and there is no timer that could end it")
        self.now += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self._jumps.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in its own loop, whose time begins at 0."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
