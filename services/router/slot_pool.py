"""SlotPool with replicas, given out first come, first served.

A call has a place from the moment its replica is chosen until the place is given back; where prefill and decode are two
replicas, it is given both places at once or none, so that no call holds one and waits for the other. When nobody has a
place left, calls wait in a bounded line. Invariant: a place that becomes free goes to the call that waits longest among
those that may use it, and wakes no other.
"""

import asyncio
import bisect
import itertools
import secrets
import time

import structlog

from penstock.errors import OverloadedError, PenstockError, PromptTooLongError, UnavailableError
from penstock.v1 import generate_pb2
from services.router.balancing import (
    PASSING,
    Balancer,
    NoReplica,
    Query,
    ReplicaStatus,
    UnroutableReason,
    explain,
    find_reason,
    largest,
    make_balancer,
)
from services.router.config import RouterConfig
from services.router.pool import Member, Pool
from services.router.slot import TRY_AGAIN_S, Slot
from services.router.wait_queue import Ticket, Waiter, WaitQueue

log = structlog.get_logger()

_LOOK_AGAIN_S = 5.0
"""How often a call that waits for a place looks whether there is anything left to wait for."""
_LOOK_OFTEN_S = 1.0
"""The same for one that has waited for nothing nearly as long as it may."""
_TIME_TO_ANSWER_S = 0.2
"""Waiting ends so long before the caller's deadline, so that the caller still hears why."""


class SlotPool:
    """The places of a pool."""

    def __init__(self, config: RouterConfig, pool: Pool) -> None:
        """Give out the places of `pool` by the policy that the configuration names."""
        self.balancer: Balancer = make_balancer(config)
        self.num_waiting = 0
        """Calls in line."""
        self._config = config
        self._pool = pool
        self._orders = itertools.count(1)
        self._lines: dict[tuple[int, frozenset[str], int], WaitQueue[Slot]] = {}
        """By need: a call never waits behind one that wants what it does not want. None is empty."""
        self._sizes = pool.sizes
        """Those by which the calls in line were told apart."""
        pool.on_change = self._serve_lines

    async def take(self, ticket: Ticket) -> Slot:
        """A place, after waiting for one if need be.

        Raises:
            OverloadedError: too many wait already, or all replicas were full or refused for as long as the call waited.
                A call that had a place before is let in line in any case: others' tokens would be lost with it.
            UnavailableError: for `wait_for_replica_s` there was no replica that could take the call.
            InvalidRequestError: no replica is large enough for it.
        """
        place = self._take_now(ticket.query)
        if place is None and ticket.order == 0:
            self._require_room(ticket.query)
        if place is None and ticket.order == 0 and self.num_waiting >= self._config.max_waiting:
            raise OverloadedError(
                f"router.max_waiting = {self._config.max_waiting} calls wait for a replica already; send fewer at "
                "once, add replicas or raise it"
            )
        ticket.order = ticket.order or next(self._orders)
        return place or await self._wait(ticket)

    def free(self, member: Member) -> None:
        """A place with this replica was given back."""
        self._pool.close_if_unused(member)
        if self._lines:
            self._serve_lines()

    def is_too_long(self, query: Query) -> bool:
        """Whether no replica of now is large enough for the call."""
        return query.num_tokens > largest(self._pool.candidates.values())

    def _require_room(self, query: Query) -> None:
        """A call that has been with a replica may wait for another as large; a new one has none to wait for."""
        if self.is_too_long(query) and not query.excluded:
            most = largest(self._pool.candidates.values())
            raise PromptTooLongError(
                f"a prompt of {query.num_tokens - 1} ids is too long: the largest replica takes {most} tokens, the "
                "response included; shorten it, or start a replica with a larger rollout.context_length"
            )

    def _take_now(self, query: Query) -> Slot | None:
        """A place, if there is one and nobody waits for it."""
        query.min_version = max(query.min_version, self._pool.min_version)
        self._measure(query)
        return None if query.need in self._lines else self._choose(query, time.monotonic())

    def _measure(self, query: Query) -> None:
        """By the sizes of now."""
        query.num_small = bisect.bisect_left(self._pool.sizes, query.num_tokens)

    def _choose(self, query: Query, now: float) -> Slot | None:
        query.min_version = max(query.min_version, self._pool.min_version)
        candidate = self.balancer.choose(query, self._pool.candidates, now)
        if candidate is None:
            return None
        self.balancer.record(query, candidate.replica_id)
        if candidate.partners is None:
            return Slot(self._pool.member(candidate.replica_id), self.free)
        partner = candidate.find_partner(query, now)
        assert partner is not None, "a prefill replica is fit with a partner only"
        prefill = Slot(self._pool.member(candidate.replica_id), self.free)
        decode = self._pool.member(partner.replica_id)
        return Slot(decode, self.free, prefill=prefill, bootstrap=_bootstrap(candidate))

    def _serve_lines(self) -> None:
        """Give what is free to those who wait, the oldest first; of each line only the head is looked at."""
        if self._pool.sizes != self._sizes:
            self._sizes = self._pool.sizes
            for line in self._lines.values():
                line.dissolve()
            self._lines.clear()
        lines, now = dict(self._lines), time.monotonic()
        while lines:
            need = min(lines, key=lambda each: lines[each].head().ticket.order)
            line, query = lines[need], lines[need].head().ticket.query
            place = self._choose(query, now)
            line.look(now, is_hopeless=place is None and self._is_hopeless(query, now))
            if place is None:
                del lines[need]
                continue
            line.serve(place)
            if not line:
                del self._lines[need], lines[need]

    def _is_hopeless(self, query: Query, now: float) -> bool:
        """Whether none of the replicas is busy with calls, or a push, that will end; none of them is fit."""
        return all(find_reason(each, query, now) not in PASSING for each in self._pool.candidates.values())

    async def _wait(self, ticket: Ticket) -> Slot:
        self.num_waiting += 1
        try:
            while (place := await self._stand_in_line(ticket)) is None:
                ticket.query.excluded = frozenset()
                self._measure(ticket.query)
            return place
        finally:
            self.num_waiting -= 1

    async def _stand_in_line(self, ticket: Ticket) -> Slot | None:
        """The place that the call was given, or None when it is time for it to look around again.

        Raises:
            PenstockError: there is nothing to wait for any more.
        """
        waiter, need = Waiter[Slot](ticket), ticket.query.need
        line = self._lines.setdefault(need, WaitQueue())
        line.join(waiter)
        self._serve_lines()
        hopeless_s = line.hopeless_s
        try:
            patience_s = self._patience_s(ticket, is_hopeless=line.is_hopeless)
            if patience_s <= 0 and not waiter.place.done():
                raise _gave_up(ticket, explain(self._pool.candidates.values(), ticket.query, line.looked_at))
            await asyncio.wait((waiter.place,), timeout=patience_s)
            if not waiter.place.done():
                self._serve_lines()
        except asyncio.CancelledError:
            if waiter.place.done():
                waiter.place.result().give_back()
            raise
        finally:
            ticket.waited_s += line.hopeless_s - hopeless_s
            line.leave(waiter)
            if not line and self._lines.get(need) is line:
                del self._lines[need]
        return None if waiter.place.cancelled() else waiter.place.result()

    def _patience_s(self, ticket: Ticket, *, is_hopeless: bool) -> float:
        """How long to stand in line before looking around again; 0 or less: not any more."""
        allowed_s = self._config.wait_for_replica_s - ticket.waited_s
        if (
            allowed_s > 0 and not is_hopeless
        ):  # it may become so, and then not much of what is allowed should be over unnoticed
            allowed_s = min(max(allowed_s, _LOOK_OFTEN_S), _LOOK_AGAIN_S)
        left_s = min(ticket.deadline - time.monotonic() - _TIME_TO_ANSWER_S, allowed_s)
        return min(left_s, TRY_AGAIN_S) if ticket.query.excluded else left_s


def _bootstrap(prefill: ReplicaStatus) -> generate_pb2.Bootstrap:
    """How both halves of a call find each other: in a room of its own."""
    described = prefill.replica.disaggregation
    return generate_pb2.Bootstrap(
        host=described.bootstrap_host,
        port=described.bootstrap_port,
        room=secrets.randbits(62),
        policy_version=prefill.policy_version,
    )


def _gave_up(ticket: Ticket, why: NoReplica) -> PenstockError:
    last = f"; the last refusal: {ticket.last_error}" if ticket.last_error is not None else ""
    if UnroutableReason.FULL in why.reasons:
        return OverloadedError(f"no place became free in time: {why}{last}")
    is_overload = isinstance(ticket.last_error, OverloadedError) or (
        ticket.last_error is None and UnroutableReason.REFUSING in why.reasons
    )
    kind = OverloadedError if is_overload else UnavailableError
    return kind(f"no replica could take the request within {ticket.waited_s:.1f} s: {why}{last}")
