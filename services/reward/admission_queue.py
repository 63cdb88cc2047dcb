"""Bounds the items in the service, running ones included: further items are refused, or wait in order of arrival."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Iterator

from penstock.errors import InvalidRequestError, OverloadedError

MAX_ITEMS = 4096
"""Maximum items in the service at once, running ones included: larger than any group, and few enough that a caller
learns of an overload while it can still send its items elsewhere. Their memory is bounded where bodies are read."""


class AdmissionQueue:
    """Admits at most `max_items` items at once."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self.max_items = max_items
        self.num_admitted = 0
        """Number of items in the service."""
        self.num_served = 0
        """Number of items that have left the service since the start."""
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @contextlib.contextmanager
    def admitted(self, num_items: int) -> Iterator[None]:
        """Have `num_items` items in the service during the context.

        Raises:
            InvalidRequestError: more items than the service ever admits at once.
            OverloadedError: more items than fit at the moment, or others wait to be admitted.
        """
        self._require_possible(num_items)
        if self._waiting or self.num_admitted + num_items > self.max_items:
            raise OverloadedError(
                f"the queue holds {self.num_admitted} of {self.max_items} items and {num_items} more do not fit; "
                "try again later, or start another reward service"
            )
        self.num_admitted += num_items
        try:
            yield
        finally:
            self._leave(num_items)

    @contextlib.asynccontextmanager
    async def admitted_in_turn(self, num_items: int) -> AsyncIterator[None]:
        """Wait until `num_items` items fit, and have them in the service during the context.

        Raises:
            InvalidRequestError: more items than the service ever admits at once.
        """
        self._require_possible(num_items)
        if self._waiting or self.num_admitted + num_items > self.max_items:
            await self._wait_for(num_items)
        else:
            self.num_admitted += num_items
        try:
            yield
        finally:
            self._leave(num_items)

    def _require_possible(self, num_items: int) -> None:
        if num_items > self.max_items:
            raise InvalidRequestError(
                f"{num_items} items are more than the queue holds; send at most {self.max_items} at once"
            )

    async def _wait_for(self, num_items: int) -> None:
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_items, admission))
        try:
            await admission
        except BaseException:
            if admission.done() and not admission.cancelled():
                self._leave(num_items)  # admitted at the moment of the cancellation
            else:
                self._admit_next()
            raise

    def _leave(self, num_items: int) -> None:
        self.num_admitted -= num_items
        self.num_served += num_items
        self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting:
            num_items, admission = self._waiting[0]
            if not admission.cancelled():
                if self.num_admitted + num_items > self.max_items:
                    return
                self.num_admitted += num_items
                admission.set_result(None)
            self._waiting.popleft()
