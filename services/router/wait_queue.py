"""Calls that wait for a place.

Invariant: of the calls that wait for the same, the one that came first is the first to be given one.
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
    """A call's right to a place, over all its tries; who came first keeps that when it has to wait again."""

    query: Query
    """What it wants."""
    deadline: float
    """Time of `time.monotonic()` at which its caller stops to wait."""
    order: int = 0
    """Its number in the line; 0 until it first asks."""
    waited_s: float = 0.0
    """How long it waited while nobody could have taken it; whoever gave it tokens ended that."""
    last_error: PenstockError | None = None
    """What its last try met with."""


class Waiter(Generic[SlotT]):
    """A ticket that stands in line."""

    __slots__ = ("place", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        """Stand for `ticket`, from now on."""
        self.ticket = ticket
        self.place: asyncio.Future[SlotT] = asyncio.get_running_loop().create_future()
        """What it is given; cancelled when it has left, or is to."""

    def __lt__(self, other: "Waiter[SlotT]") -> bool:
        return self.ticket.order < other.ticket.order


class WaitQueue(Generic[SlotT]):
    """Waiters of equal needs, the oldest first. Those that left are passed over and cleared out now and then.

    It also keeps the time in which there was no replica for them that works. A waiter cannot tell that by itself: when
    it happens to look, a replica that turns everybody away may be full of the next ones to be turned away.
    """

    __slots__ = ("_heap", "_num_left", "hopeless_s", "is_hopeless", "looked_at")

    def __init__(self) -> None:
        """Nobody waits."""
        self._heap: list[Waiter[SlotT]] = []
        self._num_left = 0
        self.hopeless_s = 0.0
        """How long there was nobody to wait for but in hope of better times, up to `looked_at`."""
        self.is_hopeless = False
        """Whether that is so now."""
        self.looked_at = 0.0
        """When somebody last looked."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._heap) - self._num_left

    def join(self, waiter: Waiter[SlotT]) -> None:
        """The waiter waits, from now on, at the place that its ticket's order gives it."""
        heapq.heappush(self._heap, waiter)

    def head(self) -> Waiter[SlotT]:
        """The oldest; there must be one."""
        while self._heap[0].place.done():
            heapq.heappop(self._heap)
            self._num_left -= 1
        return self._heap[0]

    def serve(self, place: SlotT) -> None:
        """The head gets the place and is out of the line."""
        heapq.heappop(self._heap).place.set_result(place)

    def look(self, now: float, *, is_hopeless: bool) -> None:
        """Whether there is nobody to wait for now; until now it was as it was when somebody looked before."""
        if self.is_hopeless:
            self.hopeless_s += now - self.looked_at
        self.is_hopeless, self.looked_at = is_hopeless, now

    def dissolve(self) -> None:
        """All waiters are to look where they belong now; nobody joins or is served any more."""
        for waiter in self._heap:
            waiter.place.cancel()

    def leave(self, waiter: Waiter[SlotT]) -> None:
        """The waiter waits no longer; no effect on one that was served."""
        if waiter.place.cancel():
            self._num_left += 1
        if 2 * self._num_left > len(self._heap):
            self._heap = [each for each in self._heap if not each.place.done()]
            heapq.heapify(self._heap)
            self._num_left = 0
