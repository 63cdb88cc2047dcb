"""Places with replicas, given out first come, first served.

A call has a place from the moment its replica is chosen until the place is given back. When no replica has one left,
calls wait in a bounded line. Invariants: a place that becomes free goes to the call that waits longest among those that
may use it, and wakes no other; a place is given back exactly once.
"""

import asyncio
import dataclasses
import heapq
import itertools
import time

import structlog

from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from services.router.config import RouterConfig
from services.router.policy import NoReplica, Obstacle, Policy, Query, explain, make_policy
from services.router.pool import Member, Pool

log = structlog.get_logger()

_TRY_AGAIN_S = 0.25
"""A replica that failed or refused a call is offered it again after so long, if nobody else takes it."""
_LOOK_AGAIN_S = 5.0
"""How often a call that waits for a place looks whether there is anything left to wait for."""
_TIME_TO_ANSWER_S = 0.2
"""Waiting ends so long before the caller's deadline, so that the caller still hears why."""


class UnreachableError(UnavailableError):
    """No connection: the replica never had the call."""


class Place:
    """One place with one replica. Leaving the context gives it back."""

    __slots__ = ("_is_given_back", "_is_probe", "_is_settled", "_places", "member")

    def __init__(self, places: "Places", member: Member) -> None:
        """Use `Places.take`."""
        self.member = member
        self._places = places
        self._is_given_back = False
        self._is_settled = False
        candidate = member.candidate
        candidate.num_in_flight += 1
        candidate.limit.use(candidate.num_in_flight)
        self._is_probe = candidate.breaker.begin(time.monotonic())

    def __enter__(self) -> "Place":
        """The place itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Give it back; an error of ours that leaves the context tells of the replica."""
        if isinstance(error, PenstockError) and not self._is_settled:
            self.settle(error)
        self.give_back()

    def answered(self) -> None:
        """The first part of an answer came. A probe need not wait for the last: that may take minutes."""
        if self._is_probe:
            self._is_probe = False
            self.member.candidate.breaker.succeed(probe=True)

    def settle(self, error: PenstockError | None) -> None:
        """What came of the call; without this, nothing is learnt of the replica."""
        self._is_settled = True
        candidate, now = self.member.candidate, time.monotonic()
        if isinstance(error, OverloadedError | NotReadyError):  # it is well, and turned the call away
            if isinstance(error, OverloadedError) and candidate.refusing_until <= now:  # once for calls of one moment
                candidate.limit.refuse()
            candidate.refusing_until = now + _TRY_AGAIN_S
        if error is None or isinstance(error, OverloadedError | NotReadyError | InvalidRequestError):
            candidate.breaker.succeed(probe=self._is_probe)
        elif isinstance(error, DeadlineError):  # which may be the caller's impatience
            candidate.breaker.abandon(probe=self._is_probe)
        else:
            unreachable = isinstance(error, UnreachableError)
            candidate.breaker.fail(now, probe=self._is_probe, unreachable=unreachable)

    def give_back(self) -> None:
        """The next in line may have it."""
        if self._is_given_back:
            return
        self._is_given_back = True
        if not self._is_settled:
            self.member.candidate.breaker.abandon(probe=self._is_probe)
        self.member.candidate.num_in_flight -= 1
        self._places.free(self.member)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """A call's right to a place, over all its tries; who came first keeps that when it has to wait again."""

    query: Query
    """What it wants."""
    deadline: float
    """Time of `time.monotonic()` at which its caller stops to wait."""
    order: int = 0
    """Its number in the line; 0 until it first asks."""
    waited_s: float = 0.0
    """How long it waited while nobody could have taken it."""
    last_error: PenstockError | None = None
    """What its last try met with."""


class _Waiter:
    """A claim that stands in line."""

    __slots__ = ("claim", "place")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "_Waiter") -> bool:
        return self.claim.order < other.claim.order


class _Line:
    """Waiters of equal needs, the oldest first. Those that left are passed over and cleared out now and then."""

    __slots__ = ("_heap", "_num_left")

    def __init__(self) -> None:
        self._heap: list[_Waiter] = []
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_left

    def join(self, waiter: _Waiter) -> None:
        heapq.heappush(self._heap, waiter)

    def head(self) -> _Waiter:
        """The oldest; there must be one."""
        while self._heap[0].place.done():
            heapq.heappop(self._heap)
            self._num_left -= 1
        return self._heap[0]

    def serve(self, place: Place) -> None:
        """The head gets the place and is out of the line."""
        heapq.heappop(self._heap).place.set_result(place)

    def leave(self, waiter: _Waiter) -> None:
        """The waiter waits no longer; no effect on one that was served."""
        if waiter.place.cancel():
            self._num_left += 1
        if 2 * self._num_left > len(self._heap):
            self._heap = [each for each in self._heap if not each.place.done()]
            heapq.heapify(self._heap)
            self._num_left = 0


class Places:
    """The places of a pool."""

    def __init__(self, config: RouterConfig, pool: Pool) -> None:
        """Give out the places of `pool` by the policy that the configuration names."""
        self.policy: Policy = make_policy(config)
        self.num_waiting = 0
        """Calls in line."""
        self._config = config
        self._pool = pool
        self._orders = itertools.count(1)
        self._lines: dict[tuple[int, frozenset[str]], _Line] = {}
        """By need: a call never waits behind one that wants what it does not want. None is empty."""
        pool.on_change = self._serve_lines

    async def take(self, claim: Claim) -> Place:
        """A place, after waiting for one if need be.

        Raises:
            OverloadedError: too many wait already, or all replicas were full or refused for as long as the call waited.
                A call that had a place before is let in line in any case: others' tokens would be lost with it.
            UnavailableError: for `wait_for_replica_s` there was no replica that could take the call.
        """
        place = self._take_now(claim.query)
        if place is None and claim.order == 0 and self.num_waiting >= self._config.max_waiting:
            raise OverloadedError(
                f"router.max_waiting = {self._config.max_waiting} calls wait for a replica already; send fewer at "
                "once, add replicas or raise it"
            )
        claim.order = claim.order or next(self._orders)
        return place or await self._wait(claim)

    def free(self, member: Member) -> None:
        """A place with this replica was given back."""
        self._pool.close_if_unused(member)
        if self._lines:
            self._serve_lines()

    def _take_now(self, query: Query) -> Place | None:
        """A place, if there is one and nobody waits for it."""
        query.min_version = max(query.min_version, self._pool.min_version)
        return None if query.need in self._lines else self._choose(query)

    def _choose(self, query: Query) -> Place | None:
        query.min_version = max(query.min_version, self._pool.min_version)
        candidate = self.policy.choose(query, self._pool.candidates, time.monotonic())
        if candidate is None:
            return None
        self.policy.record(query, candidate.replica_id)
        return Place(self, self._pool.member(candidate.replica_id))

    def _serve_lines(self) -> None:
        """Give what is free to those who wait, the oldest first; of each line only the head is looked at."""
        lines = dict(self._lines)
        while lines:
            need = min(lines, key=lambda each: lines[each].head().claim.order)
            line = lines[need]
            place = self._choose(line.head().claim.query)
            if place is None:
                del lines[need]
                continue
            line.serve(place)
            if not line:
                del self._lines[need], lines[need]

    async def _wait(self, claim: Claim) -> Place:
        self.num_waiting += 1
        try:
            while (place := self._take_now(claim.query)) is None:
                why = explain(self._pool.candidates.values(), claim.query, time.monotonic())
                num_unfit = sum(why.obstacles.values()) - why.obstacles.get(Obstacle.FULL, 0)
                is_hopeful = num_unfit < len(self._pool.candidates)
                patience_s = self._patience_s(claim, is_hopeful=is_hopeful)
                if patience_s <= 0:
                    raise _gave_up(claim, why)
                started = time.monotonic()
                place = await self._stand_in_line(claim, patience_s)
                if not is_hopeful:
                    claim.waited_s += time.monotonic() - started
                if place is not None:
                    break
                claim.query.excluded = frozenset()
            return place
        finally:
            self.num_waiting -= 1

    def _patience_s(self, claim: Claim, *, is_hopeful: bool) -> float:
        """How long to stand in line before looking around again; 0 or less: not any more."""
        left_s = claim.deadline - time.monotonic() - _TIME_TO_ANSWER_S
        left_s = min(left_s, _LOOK_AGAIN_S if is_hopeful else self._config.wait_for_replica_s - claim.waited_s)
        return min(left_s, _TRY_AGAIN_S) if claim.query.excluded else left_s

    async def _stand_in_line(self, claim: Claim, patience_s: float) -> Place | None:
        """The place that the call was given, or None when its patience ended first."""
        waiter, need = _Waiter(claim), claim.query.need
        line = self._lines.setdefault(need, _Line())
        line.join(waiter)
        try:
            await asyncio.wait((waiter.place,), timeout=patience_s)
        except asyncio.CancelledError:
            if waiter.place.done():
                waiter.place.result().give_back()
            raise
        finally:
            line.leave(waiter)
            if not line and self._lines.get(need) is line:
                del self._lines[need]
        return None if waiter.place.cancelled() else waiter.place.result()


def _gave_up(claim: Claim, why: NoReplica) -> PenstockError:
    last = f"; the last refusal: {claim.last_error}" if claim.last_error is not None else ""
    if Obstacle.FULL in why.obstacles:
        return OverloadedError(f"no place became free before the deadline: {why}{last}")
    is_overload = isinstance(claim.last_error, OverloadedError) or (
        claim.last_error is None and Obstacle.REFUSING in why.obstacles
    )
    kind = OverloadedError if is_overload else UnavailableError
    return kind(f"no replica could take the request within {claim.waited_s:.1f} s: {why}{last}")
