"""Calls that wait for a slot.

Invariant: among calls with equal needs, the oldest gets the first slot.
"""

import asyncio
import dataclasses
import heapq
from typing import Generic, TypeVar

from penstock.errors import PenstockError
from services.router.balancing import Query

SlotT = TypeVar("SlotT")


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A call's position in the wait queue, kept over all its attempts."""

    query: Query
    """The call's needs."""
    deadline: float
    """Time of `time.monotonic()` at which its caller stops waiting."""
    size_bytes: int = 0
    """Memory of its request while it waits, and of what its caller keeps for it."""
    order: int = 0
    """Its number, ascending; 0 before it first asks."""
    waited_s: float = 0.0
    """Seconds that it has waited while no replica could take it; a replica that gives it tokens to keep resets this."""
    wait_s: float = 0.0
    """Maximum of `waited_s`, if more than `router.wait_for_replica_s`."""
    is_patient: bool = False
    """Whether it waits until its deadline even without any replica: the call may be breaking them, and the count of
    broken replicas ends with it."""
    last_error: PenstockError | None = None
    """The failure of its last attempt."""


class Waiter(Generic[SlotT]):
    """A ticket in a queue."""

    __slots__ = ("slot", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        """Wait on behalf of `ticket`."""
        self.ticket = ticket
        self.slot: asyncio.Future[SlotT] = asyncio.get_running_loop().create_future()
        """The slot that it gets; cancelled when it has left or must leave."""

    def __lt__(self, other: "Waiter[SlotT]") -> bool:
        return self.ticket.order < other.ticket.order


class WaitQueue(Generic[SlotT]):
    """Waiters with equal needs, the oldest first. Those that left are skipped, and cleared out from time to time.

    The queue, not the waiter, accumulates time without a usable replica. A replica that rejects every call may be full,
    whenever a single waiter looks, of the next calls that it will reject.
    """

    __slots__ = ("_heap", "_num_left", "checked_at", "is_starved", "starved_s")

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[Waiter[SlotT]] = []
        self._num_left = 0
        self.starved_s = 0.0
        """Seconds without any usable replica, up to `checked_at`."""
        self.is_starved = False
        """Whether there was no usable replica at `checked_at`."""
        self.checked_at = 0.0
        """Time of the last `check`."""

    def __len__(self) -> int:
        """Return the number of waiters."""
        return len(self._heap) - self._num_left

    def join(self, waiter: Waiter[SlotT]) -> None:
        """Insert the waiter by its ticket's order."""
        heapq.heappush(self._heap, waiter)

    def head(self) -> Waiter[SlotT]:
        """Return the oldest waiter; there must be one."""
        while self._heap[0].slot.done():
            heapq.heappop(self._heap)
            self._num_left -= 1
        return self._heap[0]

    def serve(self, slot: SlotT) -> None:
        """Give the slot to the head and remove it from the queue."""
        heapq.heappop(self._heap).slot.set_result(slot)

    def check(self, now: float, *, is_starved: bool) -> None:
        """Record whether there is no usable replica now; nothing has changed since the last check."""
        if self.is_starved:
            self.starved_s += now - self.checked_at
        self.is_starved, self.checked_at = is_starved, now

    def dissolve(self) -> None:
        """Send all waiters off to queue again; none may join or be served afterwards."""
        for waiter in self._heap:
            waiter.slot.cancel()

    def leave(self, waiter: Waiter[SlotT]) -> None:
        """Remove the waiter; no effect on one that was served."""
        if waiter.slot.cancel():
            self._num_left += 1
        if 2 * self._num_left > len(self._heap):
            self._heap = [each for each in self._heap if not each.slot.done()]
            heapq.heapify(self._heap)
            self._num_left = 0
