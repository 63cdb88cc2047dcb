"""The bound on the items in the service at once, running ones included: who brings more is refused, or waits."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Iterator

from penstock.errors import InvalidRequestError, OverloadedError


class Places:
    """A number of places, given to those who wait in the order in which they came."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self.num_served = 0
        """Places that were taken and are free again, since the start."""
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @contextlib.contextmanager
    def taken(self, num_items: int) -> Iterator[None]:
        """Hold places for `num_items` items while the context lasts.

        Raises:
            InvalidRequestError: there never are so many.
            OverloadedError: there are not so many left, or others wait for them.
        """
        self._require_possible(num_items)
        if self._waiting or self.num_taken + num_items > self.num_places:
            raise OverloadedError(
                f"the queue holds {self.num_taken} of {self.num_places} items and {num_items} more do not fit; "
                "try again later, or raise reward.max_queue"
            )
        self.num_taken += num_items
        try:
            yield
        finally:
            self._free(num_items)

    @contextlib.asynccontextmanager
    async def taken_when_free(self, num_items: int) -> AsyncIterator[None]:
        """Hold places for `num_items` items while the context lasts, from when there are so many.

        Raises:
            InvalidRequestError: there never are so many.
        """
        self._require_possible(num_items)
        if self._waiting or self.num_taken + num_items > self.num_places:
            await self._wait_for(num_items)
        else:
            self.num_taken += num_items
        try:
            yield
        finally:
            self._free(num_items)

    def _require_possible(self, num_items: int) -> None:
        if num_items > self.num_places:
            raise InvalidRequestError(
                f"{num_items} items are more than the queue holds; send at most {self.num_places} at once"
            )

    async def _wait_for(self, num_items: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_items, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._free(num_items)  # its turn came as it was cancelled
            else:
                self._call_next()
            raise

    def _free(self, num_items: int) -> None:
        self.num_taken -= num_items
        self.num_served += num_items
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            num_items, turn = self._waiting[0]
            if not turn.cancelled():
                if self.num_taken + num_items > self.num_places:
                    return
                self.num_taken += num_items
                turn.set_result(None)
            self._waiting.popleft()
