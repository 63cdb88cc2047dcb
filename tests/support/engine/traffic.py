"""Calls that never run dry, so that what is to interrupt them finds some at work however late it comes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Traffic(Generic[T]):
    """`num` calls at a time: each one that ends well is followed by another until `stop`."""

    def __init__(self, call: Callable[[int], Awaitable[T]], num: int) -> None:
        """Start calls; `call` gets their numbers, from 0."""
        self._call = call
        self._num = num
        self._stopped = False
        self.calls: list[asyncio.Future[T]] = []
        for _ in range(num):
            self._start()

    async def under_way(self) -> None:
        """Return when a call that followed another has ended and a third of those that run began before it.

        They have run for all its life. Calls that only follow what ended while nobody looked have just begun.
        """
        while self._num_in_their_middle() < self._num / 3:
            running = [call for call in self.calls if not call.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.01)  # within which other ends that have arrived are seen

    def _num_in_their_middle(self) -> int:
        last = max((number for number, call in enumerate(self.calls) if call.done()), default=0)
        return sum(not call.done() for call in self.calls[:last]) if last >= self._num else 0

    def stop(self) -> None:
        """Begin no further call."""
        self._stopped = True

    def _start(self) -> None:
        call = asyncio.ensure_future(self._call(len(self.calls)))
        self.calls.append(call)
        call.add_done_callback(self._follow)

    def _follow(self, ended: "asyncio.Future[T]") -> None:
        if not self._stopped and not ended.cancelled() and ended.exception() is None:
            self._start()
