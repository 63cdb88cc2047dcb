"""Calls that wait for a slot.

Invariant: of the calls with equal needs, the oldest is the first to get a slot.
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
    """A call's position in the wait queue; it keeps it over all its attempts."""

    query: Query
    """What the call wants."""
    deadline: float
    """Time of `time.monotonic()` at which its caller stops waiting."""
    size_bytes: int = 0
    """Memory that its request takes while it waits."""
    order: int = 0
    """Its number, ascending; 0 before it first asks."""
    waited_s: float = 0.0
    """How long it has waited while no replica could have taken it; a replica that gives it tokens resets this."""
    wait_s: float = 0.0
    """How much of that it may, if more than `router.wait_for_replica_s`."""
    is_patient: bool = False
    """Whether it waits to its deadline, however long there is no replica: it may be what breaks them, and the count of
    those that it broke ends with the call."""
    last_error: PenstockError | None = None
    """The failure of its last attempt."""


class Waiter(Generic[SlotT]):
    """A ticket in a queue."""

    __slots__ = ("slot", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        """Wait on behalf of `ticket`."""
        self.ticket = ticket
        self.slot: asyncio.Future[SlotT] = asyncio.get_running_loop().create_future()
        """The slot that it gets; cancelled when it has left or must."""

    def __lt__(self, other: "Waiter[SlotT]") -> bool:
        return self.ticket.order < other.ticket.order


class WaitQueue(Generic[SlotT]):
    """Waiters with equal needs, the oldest first. Those that left are skipped, and cleared out now and then.

    The queue, not the waiter, accumulates time without a usable replica: at the moment when a single waiter looks, a
    replica that rejects everybody may be full of the next calls that it will reject.
    """

    __slots__ = ("_heap", "_num_left", "checked_at", "is_starved", "starved_s")

    def __init__(self) -> None:
        """Nobody waits."""
        self._heap: list[Waiter[SlotT]] = []
        self._num_left = 0
        self.starved_s = 0.0
        """Seconds without any usable replica, up to `checked_at`."""
        self.is_starved = False
        """Whether that was so at `checked_at`."""
        self.checked_at = 0.0
        """Time of the last `check`."""

    def __len__(self) -> int:
        """Number of waiters."""
        return len(self._heap) - self._num_left

    def join(self, waiter: Waiter[SlotT]) -> None:
        """Insert the waiter by its ticket's order."""
        heapq.heappush(self._heap, waiter)

    def head(self) -> Waiter[SlotT]:
        """The oldest waiter; there must be one."""
        while self._heap[0].slot.done():
            heapq.heappop(self._heap)
            self._num_left -= 1
        return self._heap[0]

    def serve(self, slot: SlotT) -> None:
        """Give the slot to the head and remove it from the queue."""
        heapq.heappop(self._heap).slot.set_result(slot)

    def check(self, now: float, *, is_starved: bool) -> None:
        """Record whether there is no usable replica now; since the last check nothing had changed."""
        if self.is_starved:
            self.starved_s += now - self.checked_at
        self.is_starved, self.checked_at = is_starved, now

    def dissolve(self) -> None:
        """Send all waiters off to queue anew; nobody may join or be served afterwards."""
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
